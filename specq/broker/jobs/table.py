"""All jobs whose transcript the broker keeps in memory: those that wait or run, and the most recent that ended."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from specq.broker.jobs.fair_queue import FairQueue
from specq.broker.jobs.job import BrokerJob
from specq.broker.jobs.lifecycle import JobEvent

KEEP_FINISHED = 1000
KEEP_TOKENS = 4_000_000  # prompts included, of jobs that ended


class Jobs:
    """Jobs by id; `queue` holds those without a verifier."""

    def __init__(self) -> None:
        self.active: OrderedDict[int, BrokerJob] = OrderedDict()
        self.finished: OrderedDict[int, BrokerJob] = OrderedDict()
        self.queue = FairQueue()
        self.held: Counter[str] = Counter()  # active jobs by bucket
        self.num_tokens = 0  # that the active jobs have or may have, prompts included
        self.given_up: list[tuple[BrokerJob, str]] = []  # jobs that no verifier can go on with, and why
        self._num_kept = 0  # tokens of the finished
        self._quarantined: dict[int, BrokerJob] = {}  # of the active jobs

    def get(self, job_id: int) -> BrokerJob | None:
        return self.active.get(job_id) or self.finished.get(job_id)

    def among(self, job_ids: Iterable[int]) -> list[BrokerJob]:
        """Return those of the jobs that have not ended."""
        return [job for job_id in job_ids if (job := self.active.get(job_id)) is not None]

    def add(self, job: BrokerJob, *, waits: bool = True) -> None:
        """Take a job that `waits` to be placed, or will do so later."""
        self.active[job.job_id] = job
        self.held[job.request.bucket] += 1
        self.num_tokens += job.request.max_length
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
        """Let an active job fail, since no verifier can go on with it."""
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
        """Move a job to the finished; the oldest of these is forgotten when there are too many."""
        job.note(JobEvent.FINISHED)
        self._remove(job)
        self.keep(job)

    def drop(self, job: BrokerJob) -> None:
        """Forget a job that the journal cannot take."""
        job.note(JobEvent.REFUSED)
        self._remove(job)

    def _remove(self, job: BrokerJob) -> None:
        """Take a job from the active ones."""
        self.queue.discard(job)
        if self.active.pop(job.job_id, None) is None:
            return
        bucket = job.request.bucket
        self.num_tokens -= job.request.max_length
        self.held[bucket] -= 1
        if not self.held[bucket]:
            del self.held[bucket]
        self._quarantined.pop(job.job_id, None)

    def keep(self, job: BrokerJob) -> None:
        """Keep a job that ended in memory."""
        self.finished[job.job_id] = job
        self._num_kept += job.transcript.length
        while len(self.finished) > KEEP_FINISHED or self._num_kept > KEEP_TOKENS:
            oldest = next(iter(self.finished.values()))
            if oldest is job or not oldest.durable.has_ended:  # its end must be in the journal first
                return
            del self.finished[oldest.job_id]
            self._num_kept -= oldest.transcript.length
