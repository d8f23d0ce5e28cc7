"""The open requests by key, the order in which they are sent, to which broker, and the jobs to stop.

`Turns` is the order in which requests for jobs are sent.

`Stops` holds the jobs to stop. It repeats `Cancel` until the broker reports the end of the job.

Rule: for a job without a waiting caller, `Cancel` is sent at most MAX_TRIES times. The job may have ended before, and
then the broker does not answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from dataclasses import dataclass

from specq.client.brokers import KnownBrokers
from specq.client.events import Event, RequestFailed
from specq.client.pending import PendingRequest
from specq.protocol import Cancel, Failed, JobError, Message, Tokens

MAX_UNANSWERED = 256  # most jobs sent and not answered; the others wait
MOST_HOPS = 2  # how often a request follows `Moved` at once
SEEK_S = 0.5  # pause between questions for a job whose broker is silent: another one may take it at any moment


class Turns:
    """The unsent jobs, in order. At most MAX_UNANSWERED are in progress, so that each is answered in time."""

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}
        self._unanswered: set[int] = set()

    def __contains__(self, job_id: object) -> bool:
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

    patience  first pause before a request is sent again, in seconds; `longest` is the longest one.
    outbox    the messages to send, each with the address of its broker.
    """

    def __init__(self, brokers: KnownBrokers, patience: float, longest: float) -> None:
        super().__init__()
        self._turns, self._held = Turns(), set[int]()
        self._brokers, self._patience, self._longest = brokers, patience, longest
        self.outbox: list[tuple[str, Message]] = []

    def ask(self, key: int | str, request: PendingRequest, now: float, place: str = "") -> None:
        """Send a request at once. Without a `place`, a request by name goes to the current broker."""
        self[key] = request
        request.started = now
        if self._brokers.several:
            self._brokers.put(
                key, place or (self._brokers.current if isinstance(key, str) else self._brokers.place(key))
            )
        self.send(key, request, now)

    def send(self, key: int | str, request: PendingRequest, now: float, message: Message | None = None) -> None:
        """Send a request to its broker, or another message in its place."""
        known, request.sent = self._brokers, now
        place = known.place(key)
        if known.heard is None and place not in request.queued_at:
            request.queued_at += (place,)
        if known.several and not request.is_sought(place):
            known.note_asked(place, now)
        self.outbox.append((place, message or request.message()))

    def due(self, now: float) -> list[tuple[int | str, PendingRequest]]:
        """Return the requests to send again now.

        Those at a silent broker go to the next one. So do those whose job is sought, unless all others are silent.
        """
        silent, found = self._brokers.silent(now), []
        for key, request in self.items():
            if now < request.due and not (silent and now >= request.sent + self._patience):
                continue
            place = self._brokers.place(key)
            if place in silent:
                self._turn_to(self._brokers.other(place, silent), key, request, silent)
            elif now < request.due:
                continue
            elif request.is_sought(place):
                other = self._brokers.other(place, silent)
                self._turn_to(None if other in silent else other, key, request, silent)
            else:
                request.patience = min(2 * request.patience, self._longest)
            request.hops = 0
            found.append((key, request))
        return found

    def _turn_to(self, broker: str | None, key: int | str, request: PendingRequest, silent: Collection[str]) -> None:
        """Let a request's next messages go to this broker."""
        request.patience = min(self._patience, SEEK_S) if request.holder in silent else self._patience
        if broker is not None:
            self._brokers.put(key, broker)

    def move(self, key: int | str, request: PendingRequest, address: str, now: float) -> None:
        """Send a request again to the broker that `Moved` names; after MOST_HOPS only when it is due."""
        self._turn_to(address, key, request, self._brokers.silent(now))
        request.moved = now if request.moved is None else request.moved
        if isinstance(key, int):
            self._turns.answered(key)
        if request.hops < MOST_HOPS:
            request.hops += 1
            self.send(key, request, now)

    def try_another(self, key: int | str, request: PendingRequest, refusing: str, now: float) -> bool:
        """Send a request that a broker refuses to one that has neither refused it nor is silent, if there is one."""
        request.refused += (refusing,)
        silent = self._brokers.silent(now)
        avoided = {*request.refused, *silent}
        other = self._brokers.other(refusing, avoided)
        if other is None or other in avoided or self.is_unsent(key):
            request.refused = ()
            return False
        self._turn_to(other, key, request, silent)
        self.send(key, request, now)
        return True

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

    def is_unsent(self, key: int | str) -> bool:
        """Return whether a request still waits for its release or its turn."""
        return key in self._held or key in self._turns

    def answered(self, job_id: int, now: float, sender: str) -> None:
        """Note that a broker has answered a request for a job."""
        request = self.get(job_id)
        if request is not None:
            request.progress, request.moved, request.holder = now, None, sender
            self._turns.answered(job_id)
            if self._brokers.several:
                self._brokers.put(job_id, sender)
                self.served(request, sender)

    def served(self, request: PendingRequest, sender: str) -> None:
        """Prefer a broker that served a request to a current one that refused it."""
        if self._brokers.current in request.refused:
            self._brokers.current = sender
        request.refused = ()

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

    def give_up(self, timeout_s: float, now: float) -> list[Event]:
        """End the requests without an answer in time.

        If all brokers are silent for that long, requests that await their turn fail too. Each would wait as long.
        """
        known, heard = self._brokers, self._brokers.heard
        late = [(key, one) for key, one in self.items() if now >= one.deadline(timeout_s, known.heard_from(one.holder))]
        if late and (heard is None or now >= heard + timeout_s):
            late += [(key, request) for key, request in self.items() if request.started == math.inf]
        events: list[Event] = []
        for key, request in late:
            self.forget(key)
            code, reason = request.silence(known, request.holder or known.place(key), timeout_s, now)
            events.append(RequestFailed(key, JobError(reason, code)))
        return events


MAX_TRIES = 6
RETRY_S = 0.25  # first pause; each further pause is twice as long


@dataclass(slots=True)
class _Stop:
    due: float
    patience: float
    tries: int = 1
    moves: int = 0  # how often it was sent after a `Moved`


class Stops:
    """The jobs to stop, and when to send the next `Cancel` for each.

    `longest_s` is the longest pause.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._stops: dict[int, _Stop] = {}

    def __len__(self) -> int:
        return len(self._stops)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._stops

    def add(self, job_id: int, now: float) -> Cancel:
        """Return the first `Cancel` of a job, or a further one at once."""
        patience = min(RETRY_S, self._longest_s)
        self._stops.setdefault(job_id, _Stop(now + patience, patience))
        return Cancel(job_id=job_id)

    def follows(self, job_id: int) -> bool:
        """Return whether the `Cancel` of a job is sent to the broker to which it moved: once a try."""
        stop = self._stops.get(job_id)
        if stop is None or stop.moves >= stop.tries:
            return False
        stop.moves += 1
        return True

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
