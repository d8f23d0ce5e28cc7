"""What the components of the broker share: settings, time, workers, jobs, what is in the journal, and the outbox."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from specq.broker.admission.limits import Limits
from specq.broker.admission.roles import Roles
from specq.broker.effects import Outbox, Write
from specq.broker.faults import FaultLog
from specq.broker.jobs.job import BrokerJob
from specq.broker.jobs.ledger import Ledger
from specq.broker.jobs.request import JobRequest, sharers
from specq.broker.jobs.rounds import RoundCounts
from specq.broker.jobs.table import Jobs
from specq.broker.traces import TracedJob, Traces
from specq.broker.workers.registry import WorkerRegistry
from specq.journal import Record

QUIET_BEATS = 3  # heartbeats without a message
GRACE_S = 3.0  # for verifiers to come back; meanwhile no client is refused because there is none


class BrokerSettings(NamedTuple):
    """What the broker was started with.

    liveness_s  how long a worker may be silent
    traced_at_once  jobs that are traced in all processes though they did not ask for it
    """

    heartbeat_ms: int
    liveness_s: float
    max_jobs: int
    drafters_per_job: int
    traced_at_once: int = 0

    @property
    def quiet_s(self) -> float:
        """Return how long a worker may send nothing before it is sent nothing that it can do without."""
        return QUIET_BEATS * self.heartbeat_ms / 1000


@dataclass(slots=True)
class BrokerClock:
    """The time of the message or tick that is being handled, in seconds of the caller's clock.

    offset       the journal's time (`specq.journal.interface`) = the caller's time + this
    grace_until  until then verifiers may come back that were there before: before a restart of the broker, or before
                 they crashed
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
        """Was the broker started again, or a verifier lost, so recently that it may be about to come back?"""
        return self.now < self.grace_until

    def allow(self, seconds: float) -> None:
        """Let verifiers come back for this long."""
        self.grace_until = max(self.grace_until, self.now + seconds)


class BrokerState:
    """The broker's memory, in parts.

    ledger          which records of jobs the journal holds
    roles, limits   what each key may do, and how much
    counts          what happened how often, for `specq status`; rounds: what was counted of rounds, by model
    faults, traces  what went wrong last, for `specq top`; what happened to jobs, for `specq trace`
    outbox          what is to be done
    closing         why no new jobs are taken any more, or ""
    """

    def __init__(self, settings: BrokerSettings, clock: BrokerClock, ledger: Ledger, roles: Roles, epoch: int) -> None:
        """`epoch`: all that the broker uses lie above it."""
        self.settings, self.clock = settings, clock
        self.workers, self.jobs, self.ledger = WorkerRegistry(), Jobs(), ledger
        self.roles, self.limits = roles, Limits()
        self.counts: Counter[str] = Counter()
        self.faults, self.traces = FaultLog(), Traces(settings.traced_at_once)
        self.rounds: defaultdict[str, RoundCounts] = defaultdict(RoundCounts)
        self.outbox = Outbox()
        self.closing = ""
        self._epoch = epoch

    def next_epoch(self) -> int:
        """Return an epoch above all that were used before."""
        self._epoch += 1
        return self._epoch

    def sharers(self, request: JobRequest) -> str:
        """Return whose sessions a job shares KV and texts with; without keys and salts, all share."""
        return sharers(self.roles.seen_by(request.owner), request.submit.tenant, request.submit.cache_salt)

    def record(self, record: Record, job: BrokerJob, *, ended: bool = False) -> None:
        """Journal a record of a job, which is as the record says."""
        sequence = self.ledger.mark(job, ended=ended)
        if sequence:
            self.outbox.add(Write(sequence, record))

    def begin_trace(self, job: BrokerJob, event: str = "submitted") -> None:
        """Begin to trace a new job, or one that a broker before this one had taken."""
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
