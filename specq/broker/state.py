"""What the components of the broker share: its workers, its jobs, its counters, and the outbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from specq.broker.admission.limits import Limits
from specq.broker.admission.roles import Roles
from specq.broker.jobs.job import Job
from specq.broker.jobs.ledger import Ledger
from specq.broker.jobs.table import Jobs
from specq.broker.workers.registry import WorkerRegistry
from specq.journal import Record
from specq.protocol import Frames, Message, encode
from specq.transport import Grant


class Send(NamedTuple):
    """Frames for a peer: over the ROUTER ("front"), or over the DEALER to a verifier ("back")."""

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
    """Journal a record; `Broker.journaled` takes its sequence number once it is there."""

    sequence: int
    record: Record


class Find(NamedTuple):
    """Look for a job in the journal; `Broker.found` takes the answer."""

    job_id: int


class FindFinished(NamedTuple):
    """Look for the last `limit` jobs of an owner (None: of all) that ended, but for the last `skip`; `Broker.listed` takes the
    answer."""

    client: bytes
    limit: int
    skip: int
    owner: str | None = None


Effect = Send | Connect | Disconnect | Write | Find | FindFinished


class State:
    """The broker's memory.

    incarnation  counts seconds (of the wall clock at the start, say): a later broker's epochs are greater than an
                 earlier one's, as long as that opened fewer than 1024 sessions for each second that it lived
    epoch        epochs lie above this too: the journal's highest, which needs no clock
    wall_offset  seconds since 1970 = the caller's time + this
    grants       the keys that are allowed, by name; None: there are no keys
    """

    def __init__(
        self,
        *,
        incarnation: int,
        heartbeat_ms: int,
        liveness_ms: int,
        max_jobs: int,
        has_journal: bool = False,
        epoch: int = 0,
        wall_offset: float = 0.0,
        drafters_per_job: int = 2,
        grants: Mapping[str, Grant] | None = None,
    ) -> None:
        self.drafters_per_job = drafters_per_job
        self.heartbeat_ms, self.liveness_s, self.max_jobs = heartbeat_ms, liveness_ms / 1000, max_jobs
        self.workers, self.jobs, self.ledger = WorkerRegistry(), Jobs(), Ledger(has_journal=has_journal)
        self.roles, self.limits = Roles(grants), Limits()
        self.counts: Counter[str] = Counter()
        self.now, self.wall_offset = 0.0, wall_offset
        self.trouble = ""  # why the journal cannot be written now
        self.full = ""  # why the journal has no room for new jobs
        self.closing = ""  # why no new jobs are taken any more
        self.hung: set[int] = set()  # incarnations of workers that stood still with work to do
        self.grace_until = 0.0  # until then verifiers may come back from before a restart
        self._epoch = max(incarnation << 10, epoch)
        self._outbox: list[Effect] = []

    @property
    def wall(self) -> float:
        """Return the time in seconds since 1970."""
        return self.now + self.wall_offset

    @property
    def in_grace(self) -> bool:
        """Did the broker restart so recently that its verifiers may not have come back yet?"""
        return self.now < self.grace_until

    def next_epoch(self) -> int:
        """Return an epoch above all that were used before."""
        self._epoch += 1
        return self._epoch

    def send_front(self, to: bytes, message: Message) -> None:
        """Send to a client or worker over the ROUTER."""
        self._outbox.append(Send("front", to, encode(message)))

    def send_back(self, to: bytes, message: Message) -> None:
        """Send to a verifier over its DEALER."""
        self._outbox.append(Send("back", to, encode(message)))

    def record(self, record: Record, job: Job, *, ended: bool = False) -> None:
        """Journal a record of a job, which is as the record says."""
        sequence = self.ledger.mark(job, ended=ended)
        if sequence:
            self._outbox.append(Write(sequence, record))

    def emit(self, *effects: Effect) -> None:
        self._outbox.extend(effects)

    def take_outbox(self) -> list[Effect]:
        """Return what was emitted since the last call."""
        effects, self._outbox = self._outbox, []
        return effects
