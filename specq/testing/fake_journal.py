"""A strict journal in memory: records that a broker must never write raise AssertionError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from specq.journal import JobBound, JobCrashed, JobDropped, JobEnded, JobTaken, Record, StoredJob, TokensAdded


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
