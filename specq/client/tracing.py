"""The client's events of traced jobs: submitted, accepted, each arrival of tokens, the end.

The events go to the broker, which has those of the other processes: see `specq.runtime.Tracer`.
"""

from __future__ import annotations

from specq.protocol import Clock, Message, Submit, Tokens, trace_events
from specq.runtime import Tracer

FLUSH_S = 1.0


class JobTracing:
    """The traced jobs of one client; `take_outbox` returns the events for the broker."""

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._outbox: list[Message] = []
        self._flushed = 0.0

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

    def clock(self, message: Clock) -> None:
        self.tracer.take_clock(message)

    def tick(self, now: float) -> None:
        """Send the events so far when it is time, since jobs may be long."""
        if self.tracer.is_on and now >= self._flushed + FLUSH_S:
            self._flush(now)

    def _flush(self, now: float) -> None:
        self._flushed = now
        self._outbox += self.tracer.messages()

    def take_outbox(self) -> list[Message]:
        """Return the messages to send, and clear the outbox."""
        outbox, self._outbox = self._outbox, []
        return outbox
