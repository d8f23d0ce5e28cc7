"""The open requests by key, the order in which they are sent, and the jobs to stop.

`Turns` is the order in which requests for jobs are sent.

`Stops` holds the jobs to stop. It repeats `Cancel` until the broker reports the end of the job.

Rule: for a job without a waiting caller, `Cancel` is sent at most MAX_TRIES times. The job may have ended before, and
then the broker does not answer.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from specq.client.events import Event, RequestFailed
from specq.client.pending import PendingRequest
from specq.protocol import Cancel, Failed, JobError, Message, Tokens

MAX_UNANSWERED = 256  # most jobs sent and not answered; the others wait


class Turns:
    """The unsent jobs, in order. At most MAX_UNANSWERED are in progress, so that each is answered in time."""

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}
        self._unanswered: set[int] = set()

    def __contains__(self, job_id: int) -> bool:
        """Return whether this job still waits to be sent."""
        return job_id in self._waiting

    def add(self, job_id: int) -> None:
        """Add a job that waits for its turn."""
        self._waiting[job_id] = None

    def next(self) -> int | None:
        """Return the next job that may be sent now, if any."""
        room = len(self._unanswered) < MAX_UNANSWERED
        return next(iter(self._waiting), None) if room else None

    def sent(self, job_id: int) -> None:
        """Note that a job was sent."""
        self._waiting.pop(job_id, None)
        self._unanswered.add(job_id)

    def answered(self, job_id: int) -> None:
        """Note that a job was answered."""
        self._unanswered.discard(job_id)

    def forget(self, job_id: int) -> None:
        """Forget a job that no caller requests any more."""
        self._waiting.pop(job_id, None)
        self._unanswered.discard(job_id)


class OpenRequests(dict[int | str, PendingRequest]):
    """The open requests.

    Requests for jobs (by job id) wait for their turn. Others (by name) are sent at once. A held job has no turn yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns, self._held = Turns(), set[int]()
        self.outbox: list[Message] = []

    def ask(self, key: int | str, request: PendingRequest, now: float) -> None:
        """Send a request at once."""
        self[key] = request
        request.started = request.sent = now
        self.outbox.append(request.message())

    def queue(self, job_id: int, request: PendingRequest, now: float) -> None:
        """Add a request for a job; it is sent when its turn comes."""
        self[job_id] = request
        self._turns.add(job_id)
        self.send_waiting(now)

    def hold(self, job_id: int, request: PendingRequest) -> None:
        """Add a request for a job that must not be sent before `release`."""
        self[job_id] = request
        self._held.add(job_id)

    def is_held(self, job_id: int) -> bool:
        """Return whether a request for a job awaits its release."""
        return job_id in self._held

    def release(self, job_id: int, now: float) -> None:
        """Send a held request when its turn comes."""
        self._held.discard(job_id)
        self.queue(job_id, self[job_id], now)

    def send_waiting(self, now: float) -> None:
        """Send the requests whose turn has come."""
        while (job_id := self._turns.next()) is not None:
            self.send_now(job_id, now)

    def send_now(self, job_id: int, now: float) -> None:
        """Send a request for a job before its turn comes."""
        self._turns.sent(job_id)
        self.ask(job_id, self[job_id], now)

    def is_unsent(self, job_id: int) -> bool:
        """Return whether a request for a job still waits for its release or its turn."""
        return job_id in self._held or job_id in self._turns

    def answered(self, job_id: int, now: float) -> None:
        """Note that the broker has answered a request for a job."""
        request = self.get(job_id)
        if request is not None:
            request.progress = now
            self._turns.answered(job_id)

    def leave(self, key: int | str) -> None:
        """Keep a job's request only until the broker has the job."""
        request = self[key]
        request.transcript, request.is_own = None, False
        if request.progress is not None:
            self.forget(key)

    def forget(self, key: int | str) -> None:
        """Drop a request."""
        self.pop(key, None)
        if isinstance(key, int):
            self._held.discard(key)
            self._turns.forget(key)

    def give_up(self, address: str, timeout_s: float, heard: float | None, now: float) -> list[Event]:
        """End the requests without an answer in time.

        `heard` is the time of the last message of the broker at `address`.

        If the broker is silent for that long, requests that await their turn fail too. Each would wait as long.
        """
        late = [(key, request) for key, request in self.items() if now >= request.deadline(timeout_s, heard)]
        if late and (heard is None or now >= heard + timeout_s):
            late += [(key, request) for key, request in self.items() if request.started == math.inf]
        events: list[Event] = []
        for key, request in late:
            self.forget(key)
            code, reason = request.silence(address, timeout_s, heard, now)
            events.append(RequestFailed(key, JobError(reason, code)))
        return events


MAX_TRIES = 6
RETRY_S = 0.25  # first pause; each further pause is twice as long


@dataclass(slots=True)
class _Stop:
    due: float
    patience: float
    tries: int = 1


class Stops:
    """The jobs to stop, and when to send the next `Cancel` for each.

    `longest_s` is the longest pause.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._stops: dict[int, _Stop] = {}

    def __len__(self) -> int:
        return len(self._stops)

    def add(self, job_id: int, now: float) -> Cancel:
        """Return the first `Cancel` of a job, or a further one at once."""
        patience = min(RETRY_S, self._longest_s)
        self._stops.setdefault(job_id, _Stop(now + patience, patience))
        return Cancel(job_id=job_id)

    def forget(self, job_id: int) -> None:
        """Do not stop a job: it was submitted again."""
        self._stops.pop(job_id, None)

    def take(self, message: Message) -> None:
        """Note the end of a job. A `Failed` because of a missing verifier is not an end."""
        match message:
            case Tokens(finish="") | Failed(code="no_verifier"):
                return
            case Tokens() | Failed():
                self._stops.pop(message.job_id, None)

    def due(self, now: float, awaited: Container[int | str]) -> list[Cancel]:
        """Return the messages to send again.

        `awaited` are the jobs with a caller that waits for their end.
        """
        for job_id in [i for i, stop in self._stops.items() if stop.tries >= MAX_TRIES and i not in awaited]:
            del self._stops[job_id]
        due = [(job_id, stop) for job_id, stop in self._stops.items() if now >= stop.due]
        for _, stop in due:
            stop.tries, stop.patience = stop.tries + 1, min(2 * stop.patience, self._longest_s)
            stop.due = now + stop.patience
        return [Cancel(job_id=job_id) for job_id, _ in due]
