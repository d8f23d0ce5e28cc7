"""All jobs whose transcript is in memory, and which waiting job is next.

Higher priorities go first. The clients of one priority take turns, and no client waits without end. Turns follow
deficit round robin (Shreedhar and Varghese 1995). Tokens are the cost, and the quantum is the smallest possible. So a
client with thousands of jobs waits behind one with a few. A client without waiting jobs keeps no credit. A job that
comes back goes first and is free, since it was paid for. It comes back when its verifier is lost or the broker
restarts.

A job is aged when it has waited for `AGED_S` seconds since its submission. While there are aged jobs, every second
place goes to the oldest, at any priority. So a higher priority keeps at least half of all places. A lower one never
starves.

Jobs of a negative priority are in the background: they yield their places to others, until they are aged.

Rule: a job whose model has no space delays no other job.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeVar

from specq.broker.state.job import AGED_S, BrokerJob, JobEvent, Requirements

Place = TypeVar("Place")
KEEP_FINISHED = 1000
KEEP_TOKENS = 4_000_000  # prompts included, of ended jobs


class _Line:
    """The jobs of one client and priority. For each set of requirements, the oldest is first."""

    def __init__(self) -> None:
        self.credit = 0
        self.jobs: dict[Requirements, OrderedDict[int, tuple[tuple[bool, int], BrokerJob]]] = {}

    def head(self, able: Callable[[Requirements], bool]) -> BrokerJob | None:
        """Return the next job that can be placed."""
        heads = [next(iter(waiting.values())) for requirements, waiting in self.jobs.items() if able(requirements)]
        return min(heads, key=lambda entry: entry[0])[1] if heads else None


class FairQueue:
    """Jobs by priority, client and requirements."""

    def __init__(self) -> None:
        self._lines: dict[int, OrderedDict[str, _Line]] = {}
        self._requirements: dict[int, Requirements] = {}  # by job, when it was added
        self._kinds: Counter[Requirements] = Counter()  # number of jobs with each
        self._aged_last = False  # whether age decided the last job
        self._turns = count()

    def __len__(self) -> int:
        return len(self._requirements)

    def __contains__(self, job: BrokerJob) -> bool:
        return job.job_id in self._requirements

    def quarantined(self) -> list[Requirements]:
        """Return the requirements of the waiting jobs that must run alone."""
        return [requirements for requirements in self._kinds if requirements.alone]

    def in_front(self) -> list[Requirements]:
        """Return the requirements of the waiting jobs that are not in the background."""
        lines = [line for priority, of_clients in self._lines.items() if priority >= 0 for line in of_clients.values()]
        return list(dict.fromkeys(requirements for line in lines for requirements in line.jobs))

    def requirements(self) -> list[Requirements]:
        """Return the requirements of all waiting jobs."""
        return list(self._kinds)

    def add(self, job: BrokerJob) -> None:
        """Let a job wait. A job that waits already keeps its place."""
        if job.job_id in self._requirements:
            return
        line = self._lines.setdefault(job.request.priority, OrderedDict()).setdefault(job.request.bucket, _Line())
        requirements = job.requirements
        self._requirements[job.job_id] = requirements
        self._kinds[requirements] += 1
        waiting = line.jobs.setdefault(requirements, OrderedDict())
        waiting[job.job_id] = ((not job.session.was_placed, next(self._turns)), job)
        if job.session.was_placed:
            waiting.move_to_end(job.job_id, last=False)

    def discard(self, job: BrokerJob) -> None:
        """Remove a job from the queue."""
        requirements = self._requirements.pop(job.job_id, None)
        if requirements is None:
            return
        self._kinds[requirements] -= 1
        if not self._kinds[requirements]:
            del self._kinds[requirements]
        lines = self._lines[job.request.priority]
        line = lines[job.request.bucket]
        del line.jobs[requirements][job.job_id]
        if not line.jobs[requirements]:
            del line.jobs[requirements]
        if not line.jobs:
            del lines[job.request.bucket]
        if not lines:
            del self._lines[job.request.priority]

    def take(self, place: Callable[[Requirements], Place | None], now: float = 0.0) -> tuple[BrokerJob, Place] | None:
        """Remove the next job that has a place, and return both. None: no job has a place.

        `now`: the journal's time, in seconds.
        """
        known: dict[Requirements, Place | None] = {}

        def able(requirements: Requirements) -> bool:
            if requirements not in known:
                known[requirements] = place(requirements)
            return known[requirements] is not None

        aged = None if self._aged_last else self._oldest(able, now - AGED_S)
        job = aged or self._first(able)
        if job is None:
            return None
        self._aged_last = aged is not None
        found = known[self._requirements[job.job_id]]
        assert found is not None, "only jobs that can be placed are taken"
        self.discard(job)
        return job, found

    def _first(self, able: Callable[[Requirements], bool]) -> BrokerJob | None:
        """Return the next job of the highest priority that has a placeable job."""
        for priority in sorted(self._lines, reverse=True):
            job = self._next(self._lines[priority], able)
            if job is not None:
                return job
        return None

    def _oldest(self, able: Callable[[Requirements], bool], before: float) -> BrokerJob | None:
        """Return the placeable job with the earliest submission, if it is before `before`.

        None: no such job, or all jobs have the same priority.
        """
        if len(self._lines) < 2:
            return None
        heads = [line.head(able) for lines in self._lines.values() for line in lines.values()]
        aged = [job for job in heads if job is not None and job.request.submitted < before]
        return min(aged, key=lambda job: job.request.submitted, default=None)

    def _next(self, lines: OrderedDict[str, _Line], able: Callable[[Requirements], bool]) -> BrokerJob | None:
        """Return the job of the client that needs the least further credit, and give that credit to all clients."""
        heads = [(line, job) for line in lines.values() if (job := line.head(able)) is not None]
        if not heads:
            return None
        line, job = min(heads, key=lambda head: cost(head[1]) - head[0].credit)
        missing = max(0, cost(job) - line.credit)
        for other, _ in heads:
            other.credit += missing
        if cost(job):
            line.credit -= cost(job)
            lines.move_to_end(job.request.bucket)
        return job


def cost(job: BrokerJob) -> int:
    """Return a client's price for a job's turn: the tokens that the job may take."""
    return 0 if job.session.was_placed else job.request.max_length


class Jobs:
    """Jobs by id. `queue` holds those without a verifier."""

    def __init__(self) -> None:
        self.active: OrderedDict[int, BrokerJob] = OrderedDict()
        self.finished: OrderedDict[int, BrokerJob] = OrderedDict()
        self.queue = FairQueue()
        self.held: Counter[str] = Counter()  # active jobs by bucket
        self.num_tokens = 0  # tokens that the active jobs have or may have, prompts and grammars included
        self.given_up: list[tuple[BrokerJob, str]] = []  # jobs that no verifier can continue, and why
        self._num_kept = 0  # tokens of the finished jobs, grammars included
        self._quarantined: dict[int, BrokerJob] = {}  # active jobs in quarantine

    def get(self, job_id: int) -> BrokerJob | None:
        return self.active.get(job_id) or self.finished.get(job_id)

    def among(self, job_ids: Iterable[int]) -> list[BrokerJob]:
        """Return the jobs with the given ids that have not ended."""
        return [job for job_id in job_ids if (job := self.active.get(job_id)) is not None]

    def add(self, job: BrokerJob, *, waits: bool = True) -> None:
        """Take a job. It `waits` to be placed now, or later."""
        self.active[job.job_id] = job
        self.held[job.request.bucket] += 1
        self.num_tokens += job.request.max_length + job.request.attached_size
        if waits:
            self.wait(job)
        else:
            job.note(JobEvent.READ_PLACED)
        self.note_quarantine(job)

    def wait(self, job: BrokerJob) -> None:
        """Let an active job wait for a verifier."""
        job.note(JobEvent.QUEUED)
        self.queue.add(job)

    def give_up(self, job: BrokerJob, reason: str) -> None:
        """Let an active job fail, since no verifier can continue it."""
        job.note(JobEvent.GAVE_UP)
        self.given_up.append((job, reason))

    def note_quarantine(self, job: BrokerJob) -> None:
        """Note whether an active job is in quarantine now."""
        if job.is_quarantined:
            self._quarantined[job.job_id] = job
        else:
            self._quarantined.pop(job.job_id, None)

    def isolated(self) -> set[bytes]:
        """Return the verifiers that run a job in quarantine."""
        return {verifier for job in self._quarantined.values() if (verifier := job.session.verifier)}

    def retire(self, job: BrokerJob) -> None:
        """Move a job to the finished ones. If there are too many, forget the oldest."""
        job.note(JobEvent.FINISHED)
        self._remove(job)
        self.keep(job)

    def drop(self, job: BrokerJob) -> None:
        """Forget a job that the journal cannot take, or that another broker has."""
        if self.finished.get(job.job_id) is job:
            self._forget(job)
        else:
            job.note(JobEvent.REFUSED)
            self._remove(job)

    def _remove(self, job: BrokerJob) -> None:
        """Remove a job from the active ones."""
        self.queue.discard(job)
        if self.active.pop(job.job_id, None) is None:
            return
        bucket = job.request.bucket
        self.num_tokens -= job.request.max_length + job.request.attached_size
        self.held[bucket] -= 1
        if not self.held[bucket]:
            del self.held[bucket]
        self._quarantined.pop(job.job_id, None)

    def keep(self, job: BrokerJob) -> None:
        """Keep an ended job in memory."""
        self.finished[job.job_id] = job
        self._num_kept += job.transcript.length + job.request.attached_size
        while len(self.finished) > KEEP_FINISHED or self._num_kept > KEEP_TOKENS:
            oldest = next(iter(self.finished.values()))
            if oldest is job or not oldest.durable.has_ended:  # the journal must hold its end first
                return
            self._forget(oldest)

    def _forget(self, job: BrokerJob) -> None:
        """Forget an ended job."""
        del self.finished[job.job_id]
        self._num_kept -= job.transcript.length + job.request.attached_size
