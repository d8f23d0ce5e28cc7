"""A strict journal in memory, alone or for several brokers. Time is an argument.

Records that a broker must never write raise AssertionError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from specq.journal import (
    EPOCHS,
    LEASE_S,
    MOST_TAKEN,
    JobBound,
    JobCrashed,
    JobDropped,
    JobEnded,
    JobTaken,
    Record,
    StoredJob,
    TokensAdded,
)


class FakeJournal:
    """Jobs as the records made them."""

    def __init__(self) -> None:
        self.jobs: dict[int, StoredJob] = {}
        self.num_ends: Counter[int] = Counter()

    def write(self, records: Sequence[Record]) -> None:
        """Take a group of records."""
        for record in records:
            self._apply(record)

    def _apply(self, record: Record) -> None:
        if isinstance(record, JobTaken):
            assert record.job_id not in self.jobs, "a job was taken twice"
            self.jobs[record.job_id] = StoredJob(record.submit, record.owner, record.submitted, record.deadline)
            return
        job = self.jobs[record.job_id]
        assert not job.finish or isinstance(record, JobDropped), "something happened to a job after its end"
        if isinstance(record, JobBound):
            assert not job.token_ids or job.weights == record.weights, "a text began with other weights"
            job.weights, job.placed = record.weights, record.placed
        elif isinstance(record, JobCrashed):
            job.crashes = record.crashes
        elif isinstance(record, TokensAdded):
            assert record.base_len == job.num_tokens, "tokens are missing or came twice"
            job.token_ids += record.token_ids
            job.origins += record.origins
            job.logprobs += record.logprobs
            job.rounds += 1
            job.draft_tokens += record.num_nodes
            job.cached_tokens = max(job.cached_tokens, record.cached_tokens)
        elif isinstance(record, JobEnded):
            assert record.token_ids.startswith(job.token_ids), "the end tells another story"
            _, job.finish, job.code, job.reason, job.stats, job.ended, *arrays = record
            job.token_ids, job.origins, job.logprobs = arrays
            self.num_ends[record.job_id] += 1
        else:
            del self.jobs[record.job_id]

    def unfinished(self, among: Collection[int] | None = None) -> list[StoredJob]:
        """Return the unfinished jobs, oldest first. `among`: those of these ids."""
        jobs = self.jobs.values() if among is None else [self.jobs[job_id] for job_id in among]
        found = [replace(job) for job in jobs if not job.finish]
        return sorted(found, key=lambda job: (job.submitted, job.submit.job_id))

    def find(self, job_id: int) -> StoredJob | None:
        """Return a job, or None."""
        return replace(self.jobs[job_id]) if job_id in self.jobs else None


class SharedJournal:
    """A fake journal of several brokers, by their addresses. Time is an argument."""

    def __init__(self) -> None:
        self.fake = FakeJournal()
        self.holders: dict[int, str] = {}  # of unfinished jobs
        self._until: dict[str, float] = {}  # ends of leases
        self._num_leases = 0

    def join(self, address: str, now: float) -> int:
        """Begin a broker's lease. Return what its epochs are above."""
        self.renew(address, now)
        return self._next_epoch()

    def _next_epoch(self) -> int:
        self._num_leases += 1
        return self._num_leases * EPOCHS

    def renew(self, address: str, now: float) -> tuple[str, ...]:
        """Renew a broker's lease; return the addresses of all live brokers."""
        self._until[address] = now + LEASE_S
        return tuple(sorted(one for one, until in self._until.items() if until > now))

    def leave(self, address: str) -> None:
        """End a broker's lease."""
        del self._until[address]

    def write(self, address: str, records: Sequence[Record]) -> frozenset[int]:
        """Take a group of records; return the jobs that the broker does not hold."""
        lost = set[int]()
        for record in records:
            is_new = isinstance(record, JobTaken) and record.job_id not in self.fake.jobs
            if not is_new and self.holders.get(record.job_id) != address:
                lost.add(record.job_id)
                continue
            self.fake.write([record])
            if isinstance(record, (JobEnded, JobDropped)):
                self.holders.pop(record.job_id)
            else:
                self.holders[record.job_id] = address
        return frozenset(lost)

    def take(self, address: str, now: float) -> list[StoredJob]:
        """Become the holder of jobs that no live broker holds, at most MOST_TAKEN at a time."""
        lapsed = {job_id for job_id, holder in self.holders.items() if self._until.get(holder, 0.0) <= now}
        dead = self.fake.unfinished(lapsed)[:MOST_TAKEN] if lapsed else []
        self.holders |= {job.submit.job_id: address for job in dead}
        epoch = self._next_epoch() if dead else 0
        return [replace(job, epoch=epoch) for job in dead]

    def find(self, job_id: int, now: float) -> StoredJob | None:
        """Return a job with the address of its live holder, or None."""
        found, holder = self.fake.find(job_id), self.holders.get(job_id, "")
        return found and replace(found, holder=holder if self._until.get(holder, 0.0) > now else "")
