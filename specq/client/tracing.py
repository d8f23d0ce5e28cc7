"""The client's events of traced jobs: submitted, accepted, each arrival of tokens, the end.

The events go to the broker, which has those of the other processes: see `specq.runtime.Tracer`. Of several brokers,
only the current one gets events, of the jobs that it holds: the clocks of the others are not known.
"""

from __future__ import annotations

from specq.client.brokers import KnownBrokers
from specq.protocol import Clock, Message, Submit, Tokens, TraceEvents, trace_events
from specq.runtime import ClockOffset, Tracer

FLUSH_S = 1.0


class JobTracing:
    """The traced jobs of one client; `take_outbox` returns the events for the broker."""

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._outbox: list[Message] = []
        self._flushed, self._broker = 0.0, ""  # the broker whose clock is known

    def submitted(self, job: Submit, now: float) -> None:
        if job.trace:
            self.tracer.open(job.job_id)
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
            self.tracer.end(job_id)
            self._flush(now)

    def clock(self, message: Clock, sender: str) -> None:
        if sender == self._broker:
            self.tracer.take_clock(message)

    def tick(self, now: float) -> None:
        """Send the events so far when it is time, since jobs may be long."""
        if self.tracer.is_on and now >= self._flushed + FLUSH_S:
            self._flush(now)

    def _flush(self, now: float) -> None:
        self._flushed = now
        self._outbox += self.tracer.messages()

    def take_outbox(self, brokers: KnownBrokers) -> list[tuple[str, Message]]:
        """Return the messages to send, with the address of their broker, and clear the outbox."""
        if not self._outbox:
            return []
        outbox, self._outbox = self._outbox, []
        if self._broker != brokers.current:
            self._broker, self.tracer.offset = brokers.current, ClockOffset()
            outbox = [message for message in outbox if not isinstance(message, TraceEvents)]  # times of another clock
        own = [one for one in outbox if not isinstance(one, TraceEvents) or brokers.place(one.job_id) == self._broker]
        return [(self._broker, message) for message in own]
