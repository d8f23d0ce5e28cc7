"""A strict journal in memory, and records of jobs for any journal.

Records that a broker must never write raise AssertionError in `FakeJournal`. Random histories are for real journals."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from specq.journal import (
    EPOCHS,
    LEASE_S,
    JobBound,
    JobCrashed,
    JobDropped,
    JobEnded,
    JobTaken,
    Record,
    StoredJob,
    TokensAdded,
    pack,
)
from specq.protocol import LogprobRecord, SamplingParams, Speculation, Submit


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

    def unfinished(self) -> list[StoredJob]:
        """Return the unfinished jobs, oldest first."""
        found = [replace(job) for job in self.jobs.values() if not job.finish]
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
        """Become the holder of the jobs that no live broker holds."""
        dead = [job for job in self.fake.unfinished() if self._until.get(self.holders[job.submit.job_id], 0.0) <= now]
        self.holders |= {job.submit.job_id: address for job in dead}
        epoch = self._next_epoch() if dead else 0
        return [replace(job, epoch=epoch) for job in dead]

    def find(self, job_id: int, now: float) -> StoredJob | None:
        """Return a job with the address of its live holder, or None."""
        found, holder = self.fake.find(job_id), self.holders.get(job_id, "")
        return found and replace(found, holder=holder if self._until.get(holder, 0.0) > now else "")


PARAMS = SamplingParams(temperature=0.5, seed=2**62, stop=("ü",), logit_bias=((3, -1.5),), logprobs=1)


def taken(job_id: int, submitted: float = 1.0) -> JobTaken:
    submit = Submit(
        job_id=job_id,
        params=PARAMS,
        speculation=Speculation(num_candidates=3),
        model="m",
        label='"ä"',
        tenant="alice",
        cache_salt="pepper",
        priority=-2,
        prompt_ids=np.array([1, 2, 2**31 - 1], np.int32),
    )
    return JobTaken(submit, "owner", submitted, 7.5)


def added(job_id: int, base_len: int, tokens: list[int]) -> TokensAdded:
    record = LogprobRecord(1)
    record.tokens, record.top_ids, record.top = [-0.5] * len(tokens), tokens, [-0.25] * len(tokens)
    raw = np.array(tokens, "<i4").tobytes()
    return TokensAdded(job_id, base_len, raw, bytes(len(tokens)), pack(record, 0), 4, 0 if base_len else 16)


def ended(job_id: int, tokens: list[int], at: float = 9.0, finish: str = "length") -> JobEnded:
    one = added(job_id, 0, tokens)
    code, reason = ("engine", "it broke") if finish == "error" else ("", "")
    stats = {"rounds": 3, "positions": [[1, 2]]}
    return JobEnded(job_id, finish, code, reason, stats, at, one.token_ids, one.origins, one.logprobs)


def history(rng: random.Random, num_jobs: int = 12, length: int = 300) -> list[Record]:
    """Return records of jobs that begin, continue, end or are dropped at random."""
    records: list[Record] = []
    texts: dict[int, list[int]] = {}
    over: set[int] = set()
    for _ in range(length):
        job_id = rng.randrange(1, num_jobs)
        if job_id not in texts:
            texts[job_id] = []
            records += [taken(job_id, float(len(records))), JobBound(job_id, f"w{job_id}")]
        elif job_id in over:
            continue
        elif rng.random() < 0.05:
            finish = rng.choice(["stop", "error", "cancelled"])
            records.append(ended(job_id, texts[job_id], float(len(records)), finish))
            over.add(job_id)
        elif rng.random() < 0.02:
            records.append(JobDropped(job_id))
            del texts[job_id]
        else:
            tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 5))]
            records.append(added(job_id, len(texts[job_id]), tokens))
            texts[job_id] += tokens
    return records


def groups(rng: random.Random, records: list[Record]) -> Iterator[list[Record]]:
    """Cut records into groups of random sizes."""
    while records:
        size = rng.randrange(1, 40)
        yield records[:size]
        records = records[size:]


def plain(job: StoredJob | None) -> StoredJob | None:
    """Return a job as a reader finds it.

    It lacks counts that only a running broker has. An unfinished job also lacks its tokens and weights.
    """
    bare = job and replace(job, rounds=0, draft_tokens=0, cached_tokens=0)
    return bare if not bare or bare.finish else replace(bare, weights="", token_ids=b"", origins=b"", logprobs=b"")
