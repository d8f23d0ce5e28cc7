"""Jobs as the journal's records, and which of these the journal holds.

Each record that goes to the journal has a sequence number; `Ledger.settle` takes the number up to which all are there,
and returns the jobs that clients may now receive more of. Without a journal every record counts as there at once.
`restored` makes a job of all its records.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from specq.broker.state.job import BrokerJob, JobRequest
from specq.broker.state.transcript import Commit
from specq.journal import JobBound, JobCrashed, JobEnded, JobTaken, StoredJob, TokensAdded, pack, unpack
from specq.protocol import Failed, num_drafted


class Ledger:
    """The records that are on their way to the journal, in order.

    trouble  why the journal cannot be written now, or ""
    full     why the journal has no room for new jobs, or ""
    num_groups, write_s   groups of records that were written so far, and the seconds that it took
    """

    def __init__(self, *, has_journal: bool) -> None:
        self.has_journal = has_journal
        self.sequence = self.settled = 0
        self.trouble = self.full = ""
        self.num_groups, self.write_s = 0, 0.0
        self._marks: deque[tuple[int, BrokerJob, int, bool]] = (
            deque()
        )  # sequence, job, tokens it has by then, has it ended

    def mark(self, job: BrokerJob, *, ended: bool = False) -> int:
        """Return the sequence number for a record of this job as it is now; 0 if it need not go anywhere."""
        if not self.has_journal:
            job.durable.note(job.transcript.num_tokens, ended=ended)
            return 0
        self.sequence += 1
        self._marks.append((self.sequence, job, job.transcript.num_tokens, ended))
        return self.sequence

    def settle(self, sequence: int) -> list[BrokerJob]:
        """Note that the journal holds all records up to this one; return the jobs that it concerns."""
        marks, concerned = self._marks, dict[int, BrokerJob]()
        while marks and marks[0][0] <= sequence:
            _, job, num_tokens, ended = marks.popleft()
            job.durable.note(num_tokens, ended=ended)
            concerned[job.job_id] = job
        self.settled = max(self.settled, sequence)
        return list(concerned.values())


def taken_record(job: BrokerJob) -> JobTaken:
    """Return the record of the job itself."""
    request = job.request
    return JobTaken(request.submit, request.owner, request.submitted, request.deadline)


def bound_record(job: BrokerJob) -> JobBound:
    """Return the record of where the job is, and of the weights that its text comes from."""
    return JobBound(job.job_id, job.session.weights, job.session.incarnation)


def crashed_record(job: BrokerJob) -> JobCrashed:
    """Return the record of the verifiers that crashed while they held the job."""
    return JobCrashed(job.job_id, job.crashes)


def added_record(job: BrokerJob, commit: Commit, known: int) -> TokensAdded:
    """Return the record of what a verdict added beyond the tokens that were known."""
    transcript = job.transcript
    base_len = commit.base_len - transcript.prompt_len + known
    logprobs = pack(transcript.logprobs, base_len) if transcript.logprobs.num_top >= 0 else b""
    raw, origins = commit.raw[4 * known :], commit.origins[known:]
    cached = 0 if base_len else job.stats.cached_tokens
    return TokensAdded(job.job_id, base_len, raw, origins, logprobs, commit.num_nodes, cached)


def ended_record(job: BrokerJob) -> JobEnded:
    """Return the record of the job's end."""
    transcript, failure = job.transcript, job.transcript.failure
    return JobEnded(
        job.job_id,
        transcript.finish,
        failure.code if failure else "",
        failure.reason if failure else "",
        job.stats.to_dict(),
        transcript.ended_at,
        np.array(transcript.token_ids, "<i4").tobytes(),
        bytes(transcript.origins),
        pack(transcript.logprobs, 0),
    )


def restored(stored: StoredJob) -> BrokerJob:
    """Return a job as the journal has it."""
    job = BrokerJob(JobRequest(stored.submit, stored.owner, stored.submitted, stored.deadline))
    _restore_text(job, stored)
    job.session.weights, job.session.incarnation = stored.weights, stored.placed
    job.session.was_placed = bool(stored.weights)
    job.crashes = stored.crashes
    job.stats.rounds, job.stats.draft_tokens = stored.rounds, stored.draft_tokens
    job.stats.cached_tokens = stored.cached_tokens
    job.stats.accepted_tokens, job.stats.final = num_drafted(job.transcript.origins), stored.stats
    job.durable.note(job.transcript.num_tokens, ended=bool(stored.finish))
    return job


def _restore_text(job: BrokerJob, stored: StoredJob) -> None:
    transcript = job.transcript
    transcript.token_ids = np.frombuffer(stored.token_ids, "<i4").tolist()
    transcript.origins = bytearray(stored.origins)
    transcript.logprobs = unpack(stored.logprobs, job.request.params.logprobs)
    transcript.finish, transcript.ended_at = stored.finish, stored.ended
    if stored.code:
        transcript.failure = Failed(job_id=job.job_id, code=stored.code, reason=stored.reason)
