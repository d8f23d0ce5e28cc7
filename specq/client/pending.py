"""The requests that wait for an answer, by key, and what to send for them.

The client asks whether the broker passes on grammars before it sends the first job with one. Rule: a job with a grammar
goes only to a broker whose report names its kind. Until the answer it is held back. "Yes" holds for the connection.
After "no" the client asks again, but not within RECHECK_S, since a broker may be upgraded. A broker that is replaced by
an older one refuses such a job as a whole.

`PendingRequest` is one such request. `Turns` is the order in which requests for jobs are sent.

`Stops` holds the jobs to stop. It repeats `Cancel` until the broker reports the end of the job.

Rule: for a job without a waiting caller, `Cancel` is sent at most MAX_TRIES times. The job may have ended before, and
then the broker does not answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

from specq.client.events import Event, FoundJob, ReceivedTranscript, RequestFailed
from specq.protocol import (
    GRAMMAR_KINDS,
    Cancel,
    Failed,
    Follow,
    GetStatus,
    JobError,
    JobInfo,
    LogprobRecord,
    Message,
    Submit,
    Tokens,
    grammar_kind,
    has_grammar_kind,
)

CAPABILITIES = "capabilities"  # key of the request
RECHECK_S = 10.0


class GrammarCheck:
    """The broker's answer, and the jobs that wait for it.

    address   of the broker, for messages to the user.
    patience  silence after which the request is sent again, in seconds.
    """

    def __init__(self, address: str, requests: OpenRequests, patience: float) -> None:
        self.address, self._requests, self._patience = address, requests, patience
        self._named: tuple[str, ...] = ()  # the broker's capabilities
        self._ask_after = -math.inf
        self._kinds: dict[int, str] = {}  # of the jobs that wait, by id

    def queue(self, job: Submit, request: PendingRequest, now: float) -> list[Event]:
        """Queue a job, or hold it until the broker has answered. Return its failure if the broker is too old."""
        kind = grammar_kind(job.params.grammar)
        if not kind or has_grammar_kind(self._named, kind):
            self._requests.queue(job.job_id, request, now)
            return []
        if now < self._ask_after:
            return [self._refused(job.job_id, kind)]
        self._requests.hold(job.job_id, request)
        self._kinds[job.job_id] = kind
        if CAPABILITIES not in self._requests:
            self._requests.ask(CAPABILITIES, PendingRequest(GetStatus, self._patience), now)
        return []

    def answered(self, report: dict[str, Any], now: float) -> list[Event]:
        """Take the broker's report: queue the jobs that waited for it, and return the failures of the others."""
        self._requests.forget(CAPABILITIES)
        named = report.get("capabilities")
        self._named = tuple(map(str, named)) if isinstance(named, list) else ()
        self._ask_after = now + RECHECK_S
        failed: list[Event] = []
        for job_id, kind in self._take_waiting():
            if has_grammar_kind(self._named, kind):
                self._requests.release(job_id, now)
            else:
                self._requests.forget(job_id)
                failed.append(self._refused(job_id, kind))
        return failed

    def given_up(self, events: Iterable[Event]) -> list[Event]:
        """Return the failures of the jobs that wait, if the question itself is among the given up requests."""
        errors = [one.error for one in events if isinstance(one, RequestFailed) and one.key == CAPABILITIES]
        failed = [RequestFailed(job_id, error) for error in errors for job_id, _ in self._take_waiting()]
        for one in failed:
            self._requests.forget(one.key)
        return list[Event](failed)

    def _take_waiting(self) -> list[tuple[int, str]]:
        """Return the jobs that still wait, and forget them here."""
        kinds, self._kinds = self._kinds, {}
        return [(job_id, kind) for job_id, kind in kinds.items() if self._requests.is_held(job_id)]

    def _refused(self, job_id: int, kind: str) -> RequestFailed:
        known = ", ".join(kind for kind in GRAMMAR_KINDS if has_grammar_kind(self._named, kind))
        reason = (
            f"the broker at {self.address} is too old for a grammar of the kind {kind}; "
            f"{f'it knows {known}' if known else 'it knows no grammars'}. Upgrade it, or leave the grammar out"
        )
        return RequestFailed(job_id, JobError(reason, field="grammar"))


MAX_UNANSWERED = 256  # most jobs sent and not answered; the others wait


@dataclass(slots=True)
class PendingRequest:
    """A request that waits for its answer; `started` and `sent` are infinite until it is sent.

    A request for a job is one of three kinds: submitted (`own_job`), looked up (`search`), or detached. The first has a
    waiting caller. The last has no transcript.
    """

    message: Callable[[], Message]
    patience: float  # silence after which it is sent again
    transcript: ReceivedTranscript | None = None  # of a job whose tokens are wanted
    is_own: bool = False  # a job of this client: it stops when no caller waits for it
    keep_running: bool = False  # the job is left to the broker instead
    until_end: bool = True  # whether a search waits for the end of the job
    info: JobInfo | None = None  # of a job that is looked up, once it is known
    started: float = math.inf
    sent: float = math.inf
    progress: float | None = None  # time of the broker's last answer to it
    broker_until: float = -math.inf  # how long to wait for a silent broker
    verifier_until: float = -math.inf  # how long to wait for a verifier
    waits_for: tuple[str, str] = ("", "")  # the last notice to the user, and the broker's reason for it
    doomed: bool = False  # its tokens ended with "error"; the reason may follow

    @property
    def is_search(self) -> bool:
        """Whether this looks up a job by its id."""
        return self.transcript is not None and not self.is_own

    def join(self, job: Submit) -> list[Event]:
        """Return the events so far, for a caller that submits a waiting job again."""
        message = self.message()
        assert isinstance(message, Submit) and self.transcript is not None, "only own jobs are joined"  # noqa: PT018
        is_same = job.digest == message.digest if job.digest else replace(message, have=0) == replace(job, have=0)
        if not is_same:
            return [RequestFailed(job.job_id, JobError(f"job {job.job_id} exists with other content", "conflict"))]
        return [*self.transcript.so_far(job.job_id)]

    def found(self, job_id: int, error: JobError | None = None) -> FoundJob:
        """Return what is known of a job that was looked up. The times are the broker's."""
        assert self.transcript is not None, "only a search finds a job"
        finished = self.info.elapsed_ms / 1e3 if self.info else None
        transcript = replace(self.transcript, started=0.0, first_token=None, finished=finished)
        return FoundJob(job_id, self.info, transcript, error)

    def take_info(self, info: JobInfo) -> None:
        """Store the description of a job that is looked up."""
        if self.info is None and self.transcript is not None:
            self.transcript.logprobs = LogprobRecord(info.params.logprobs)
        self.info = info

    @property
    def due(self) -> float:
        return self.sent + self.patience

    def deadline(self, timeout_s: float, heard: float | None) -> float:
        """Return when to give up: `timeout_s` after the last answer to this request.

        A job that the broker has accepted may wait for long. It is given up `timeout_s` after `heard`, the time of the
        broker's last message.
        """
        answered = self.started if self.progress is None else self.progress
        if self.transcript is not None and self.progress is not None:
            answered = max(answered, heard or answered)
        return max(answered + timeout_s, self.broker_until)

    def silence(self, address: str, timeout_s: float, heard: float | None, now: float) -> tuple[str, str]:
        """Return the code and the reason for a request that is given up.

        `heard` is the time of the broker's last message.
        """
        if heard is None:
            return "no_broker", no_broker(address, max(timeout_s, round(now - self.started, 1)))
        if now < heard + timeout_s:
            return "lost", f"the broker at {address} is there, but has not answered this for {timeout_s:g} s"
        return "lost", f"the broker at {address} has been silent for {timeout_s:g} s"


def own_job(job: Submit, patience: float, now: float, *, keep_running: bool = False) -> PendingRequest:
    """Return the request for a job that is submitted and waited for."""
    transcript = ReceivedTranscript(now, logprobs=LogprobRecord(job.params.logprobs))
    message = lambda: replace(job, have=len(transcript.token_ids))  # noqa: E731 - what it has grows
    return PendingRequest(message, patience, transcript, is_own=True, keep_running=keep_running)


def search(job_id: int, patience: float, now: float, *, until_end: bool) -> PendingRequest:
    """Return the request for a job that is looked up by its id."""
    transcript = ReceivedTranscript(now)
    return PendingRequest(
        lambda: Follow(job_id=job_id, have=len(transcript.token_ids)), patience, transcript, until_end=until_end
    )


def no_broker(address: str, timeout_s: float) -> str:
    """Return the user's message for a broker that does not answer."""
    return (
        f"no broker answered at {address} within {timeout_s:g} s; start one with `make broker` or `specq up`, "
        "or name another with --broker; one with keys answers only to keys that it knows (--keys)"
    )


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
