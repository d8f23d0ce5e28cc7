"""The requests that wait for their answer, by key, and what is to be sent for them."""

from __future__ import annotations

import math

from specq.client.events import Event, RequestFailed
from specq.client.pending import Pending, Turns
from specq.protocol import JobError, Message


class OpenRequests(dict[int | str, Pending]):
    """Requests for jobs (by job id) wait for their turn; others (by name) are sent at once."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()
        self.outbox: list[Message] = []

    def ask(self, key: int | str, request: Pending, now: float) -> None:
        """Send a request at once."""
        self[key] = request
        request.started = request.sent = now
        self.outbox.append(request.message())

    def queue(self, job_id: int, request: Pending, now: float) -> None:
        """Send a request for a job when its turn comes."""
        self[job_id] = request
        self._turns.add(job_id)
        self.send_waiting(now)

    def send_waiting(self, now: float) -> None:
        """Send the requests whose turn has come."""
        while (job_id := self._turns.next()) is not None:
            self.send_now(job_id, now)

    def send_now(self, job_id: int, now: float) -> None:
        """Send a request for a job before its turn comes."""
        self._turns.sent(job_id)
        self.ask(job_id, self[job_id], now)

    def is_unsent(self, job_id: int) -> bool:
        """Return whether a request for a job still waits for its turn."""
        return job_id in self._turns

    def answered(self, job_id: int, now: float) -> None:
        """Note that the broker has answered a request for a job."""
        request = self.get(job_id)
        if request is not None:
            request.progress = now
            self._turns.answered(job_id)

    def leave(self, key: int | str) -> None:
        """Wait for a job no longer than until the broker has it."""
        request = self[key]
        request.transcript, request.is_own = None, False
        if request.progress is not None:
            self.forget(key)

    def forget(self, key: int | str) -> None:
        """Drop a request."""
        self.pop(key, None)
        if isinstance(key, int):
            self._turns.forget(key)

    def give_up(self, address: str, timeout_s: float, heard: float | None, now: float) -> list[Event]:
        """End the requests that got no answer in time; the broker at `address` was `heard` last then. If it has been
        silent for as long, those that wait for their turn end with them: each would wait as long."""
        late = [(key, request) for key, request in self.items() if now >= request.deadline(timeout_s, heard)]
        if late and (heard is None or now >= heard + timeout_s):
            late += [(key, request) for key, request in self.items() if request.started == math.inf]
        events: list[Event] = []
        for key, request in late:
            self.forget(key)
            code, reason = request.silence(address, timeout_s, heard, now)
            events.append(RequestFailed(key, JobError(reason, code)))
        return events
