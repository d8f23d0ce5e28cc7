"""The client's events of traced jobs: submitted, accepted, each arrival of tokens, the end.

The events go to the broker that has the job, which has those of the other processes: see `specq.runtime.Tracer`.
"""

from __future__ import annotations

from specq.client.brokers import KnownBrokers
from specq.protocol import Clock, Message, Submit, Tokens, trace_events
from specq.runtime import Tracer

FLUSH_S = 1.0


class JobTracing:
    """The traced jobs of one client; `take_outbox` returns the events for the brokers."""

    def __init__(self, brokers: KnownBrokers) -> None:
        self.tracer, self._brokers = Tracer(), brokers
        self._running = set[int]()  # jobs whose broker may change
        self._receivers: set[str] = set()  # brokers that may lack events
        self._outbox: list[tuple[str, Message]] = []
        self._flushed = 0.0

    def submitted(self, job: Submit, now: float) -> None:
        if job.trace:
            self.tracer.open(job.job_id, self._brokers.place(job.job_id))
            self._running.add(job.job_id)
            self.tracer.note(job.job_id, trace_events.SUBMITTED, now, len(job.prompt_ids))
            self._flush(now)

    def accepted(self, job_id: int, now: float) -> None:
        self.tracer.note(job_id, trace_events.ACCEPTED, now)

    def received(self, message: Tokens, now: float) -> None:
        self.tracer.note(message.job_id, trace_events.RECEIVED, now, message.base_len, len(message.token_ids))

    def ended(self, job_id: int | str, num_tokens: int = 0) -> None:
        """Note the end of a job, or that no caller waits for it any more."""
        if isinstance(job_id, int) and self.tracer.traces(job_id):
            now = self.tracer.clock()
            self.tracer.note(job_id, trace_events.ENDED, now, num_tokens)
            self._follow()
            self._running.discard(job_id)
            self.tracer.end(job_id)
            self._flush(now)

    def clock(self, message: Clock, sender: str) -> None:
        self.tracer.take_clock(message, sender)

    def tick(self, now: float) -> None:
        """Send the events so far when it is time, since jobs may be long."""
        if self.tracer.is_on and now >= self._flushed + FLUSH_S:
            self._flush(now)

    def _follow(self) -> None:
        """Find the broker of each running job."""
        self._running = {job_id for job_id in self._running if self.tracer.traces(job_id)}
        for job_id in self._running:
            self.tracer.open(job_id, self._brokers.place(job_id))
            self._receivers.add(self._brokers.place(job_id))

    def _flush(self, now: float) -> None:
        self._flushed = now
        self._follow()
        for address in list(self._receivers):
            messages = [(address, message) for message in self.tracer.messages(address)]
            self._outbox += messages
            if not messages:
                self._receivers.discard(address)

    def take_outbox(self) -> list[tuple[str, Message]]:
        """Return the messages to send, each with the address of its broker, and clear the outbox."""
        outbox, self._outbox = self._outbox, []
        return outbox
