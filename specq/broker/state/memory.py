"""The state that the broker's components share (`BrokerState`), and the effects that they request.

Rule: components import the state. The state imports no component.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from specq.broker.state.job import BrokerJob, JobRequest, sharers
from specq.broker.state.ledger import Ledger
from specq.broker.state.registry import WorkerRegistry
from specq.broker.state.rights import Limits, Roles
from specq.broker.state.table import Jobs
from specq.broker.state.traces import TracedJob, Traces
from specq.broker.state.transcript import RoundCounts
from specq.journal import Record
from specq.protocol import Frames, Message, encode

MAX_REASON = 2000  # characters; a reason may quote a value as long as its whole message
MOST_FAULTS, MOST_OF_ONE = 32, 8
MOST_CHARACTERS = 300
QUIET_BEATS = 3  # heartbeats without a message
GRACE_S = 3.0  # time for verifiers to come back; until then their absence is not a reason to refuse clients


class Send(NamedTuple):
    """Frames for a peer: "front" uses the ROUTER, "back" the DEALER to a verifier, or the ROUTER if it dials out."""

    link: str
    to: bytes
    frames: Frames


class Connect(NamedTuple):
    """Connect a DEALER to a verifier's endpoint."""

    to: bytes
    endpoint: str


class Disconnect(NamedTuple):
    """Close the DEALER to a verifier."""

    to: bytes


class Write(NamedTuple):
    """Write a record to the journal. `Broker.journaled` takes its sequence number once the journal holds it."""

    sequence: int
    record: Record


class Find(NamedTuple):
    """Find a job in the journal. `Broker.found` takes the answer."""

    job_id: int


class FindFinished(NamedTuple):
    """Find the last `limit` ended jobs of an owner, after skipping the newest `skip`. None: of all owners.

    `with_unfinished`: find the unfinished ones of all brokers, too. `Broker.listed` takes the answer.
    """

    client: bytes
    limit: int
    skip: int
    owner: str | None = None
    with_unfinished: bool = False


Effect = Send | Connect | Disconnect | Write | Find | FindFinished


class Outbox:
    """The effects of the current message or tick, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def send_front(self, to: bytes, message: Message) -> None:
        """Send to a client or worker over the ROUTER."""
        self._effects.append(Send("front", to, encode(message)))

    def send_back(self, to: bytes, message: Message) -> None:
        """Send to a verifier over its DEALER."""
        self._effects.append(Send("back", to, encode(message)))

    def add(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def take(self) -> list[Effect]:
        """Return the effects added since the last call."""
        effects, self._effects = self._effects, []
        return effects


def clipped(reason: str) -> str:
    """Shorten a reason so that it fits into a message."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."


class FaultLog:
    """The latest faults, newest first."""

    def __init__(self) -> None:
        self._faults: deque[dict[str, Any]] = deque(maxlen=MOST_FAULTS)

    def note(self, kind: str, who: str, reason: str, now: float, *, by: str = "", owner: str | None = None) -> None:
        """Note a fault of a worker or job (`who`).

        - `by`: the key or socket that caused it. "": unknown.
        - `owner`: owner of the job. None: the fault does not belong to a job.
        """
        last = self._faults[0] if self._faults else {}
        reason = "".join(one if one.isprintable() else " " for one in reason[:MOST_CHARACTERS])
        if (kind, who, reason) == (last.get("kind"), last.get("who"), last.get("reason")):
            last["count"], last["at"] = last["count"] + 1, now
            return
        self._make_room(by)
        fault = {"kind": kind, "who": who, "reason": reason, "count": 1, "at": now, "by": by, "owner": owner}
        self._faults.appendleft(fault)

    def _make_room(self, by: str) -> None:
        """Forget the oldest fault of a key or socket that has reached its limit."""
        own = [place for place, fault in enumerate(self._faults) if by and fault["by"] == by]
        if len(own) >= MOST_OF_ONE:
            del self._faults[own[-1]]

    def report(self, now: float, may_see: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the faults that a peer may see, as JSON-able values."""
        return [
            {"age_s": round(now - fault["at"], 1)} | {name: fault[name] for name in ("kind", "who", "reason", "count")}
            for fault in self._faults
            if fault["owner"] is None or may_see(fault["owner"])
        ]


class BrokerSettings(NamedTuple):
    """The broker's start options.

    - `liveness_s`: how long a worker may be silent, in seconds.
    - `traced_at_once`: number of jobs traced in all processes without having asked for it.
    """

    heartbeat_ms: int
    liveness_s: float
    max_jobs: int
    drafters_per_job: int
    traced_at_once: int = 0

    @property
    def quiet_s(self) -> float:
        """Return how long a worker may be silent before the broker stops sending it optional messages, in seconds."""
        return QUIET_BEATS * self.heartbeat_ms / 1000


@dataclass(slots=True)
class BrokerClock:
    """The time of the current message or tick, in seconds of the caller's clock.

    - `offset`: the journal's time (`specq.journal.interface`) is the caller's time plus this.
    - `grace_until`: until then, verifiers from before a broker restart or a crash may return.
    """

    offset: float = 0.0
    now: float = 0.0
    grace_until: float = 0.0

    @property
    def journal_time(self) -> float:
        """Return the time as it is stored with jobs."""
        return self.now + self.offset

    @property
    def in_grace(self) -> bool:
        """Return whether a missing verifier may return, shortly after a broker restart or a lost verifier."""
        return self.now < self.grace_until

    def allow(self, seconds: float) -> None:
        """Give verifiers this many seconds to come back."""
        self.grace_until = max(self.grace_until, self.now + seconds)


class BrokerState:
    """The broker's memory, in parts.

    - `settings`: the broker's start options.
    - `clock`: the time of the current message or tick.
    - `jobs`: all jobs, and which one is next.
    - `workers`: the registered workers.
    - `ledger`: which records of jobs the journal holds.
    - `roles`, `limits`: what each key may do, and how much.
    - `counts`: event counts, for `specq status`.
    - `rounds`: counts of rounds, by model.
    - `faults`: the latest faults, for `specq top`.
    - `traces`: what happened to jobs, for `specq trace`.
    - `outbox`: effects. Components add them and the broker's process carries them out.
    - `closing`: why the broker accepts no new jobs, or "".
    - `address`: where other machines reach this broker.
    - `brokers`: addresses of all brokers that use the journal. Empty: it is for one.
    - `epoch`: the epochs of new jobs are above this.
    """

    def __init__(self, settings: BrokerSettings, clock: BrokerClock, ledger: Ledger, roles: Roles, epoch: int) -> None:
        self.settings, self.clock = settings, clock
        self.workers, self.jobs, self.ledger = WorkerRegistry(), Jobs(), ledger
        self.roles, self.limits = roles, Limits()
        self.counts: Counter[str] = Counter()
        self.faults, self.traces = FaultLog(), Traces(settings.traced_at_once)
        self.rounds: defaultdict[str, RoundCounts] = defaultdict(RoundCounts)
        self.outbox = Outbox()
        self.closing, self.address, self.brokers = "", "", tuple[str, ...]()
        self.epoch = epoch
        self._num_epochs = 0

    def next_epoch(self, job: BrokerJob) -> int:
        """Return an epoch for a session of a job, above all its earlier ones.

        Those of a job that was taken are above the epochs of its former broker. That one does not know which broker has
        the job now, so the base comes from the journal.
        """
        self._num_epochs += 1
        return max(self.epoch, job.session.base_epoch) + self._num_epochs

    def sharers(self, request: JobRequest) -> str:
        """Return the group that shares KV and texts with a job. Without keys and salts, all jobs share."""
        return sharers(self.roles.seen_by(request.owner), request.submit.tenant, request.submit.cache_salt)

    def record(self, record: Record, job: BrokerJob, *, ended: bool = False) -> None:
        """Write a record of a job to the journal. The job must be in the state that the record describes."""
        sequence = self.ledger.mark(job, ended=ended)
        if sequence:
            self.outbox.add(Write(sequence, record))

    def begin_trace(self, job: BrokerJob, event: str = "submitted") -> None:
        """Begin to trace a job: a new one, or one from an earlier broker."""
        request = job.request
        trace = job.trace = self.traces.trace_of(job.job_id, was_asked=request.submit.trace)
        trace.note(event, self.clock.now, prompt_tokens=request.prompt_len, tokens=job.transcript.num_tokens)
        shown = (job.job_id, request.owner, request.submit.label, request.model, request.submitted)
        for job_id in self.traces.add(TracedJob(*shown, trace)):
            if (untraced := self.jobs.get(job_id)) is not None:
                untraced.trace = None

    def end_trace(self, job: BrokerJob) -> None:
        """Note that a job has ended."""
        transcript, failure = job.transcript, job.transcript.failure
        self.traces.end(job.job_id, transcript.finish)
        if job.trace is not None:
            ended = {"finish": transcript.finish, "tokens": transcript.num_tokens}
            job.trace.note("finished", self.clock.now, **ended, reason=failure.reason[:300] if failure else "")
