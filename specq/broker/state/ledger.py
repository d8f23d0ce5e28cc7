"""Jobs as the journal's records, and which records the journal holds.

Each record has a sequence number. `Ledger.settle` takes the number up to which the journal holds all records. It
returns the jobs whose clients may now receive more. Without a journal, every record counts as held at once. `restored`
makes a job from all its records.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from specq.broker.state.job import BrokerJob, JobRequest
from specq.broker.state.transcript import Commit
from specq.journal import JobBound, JobCrashed, JobEnded, JobTaken, StoredJob, TokensAdded, pack, unpack
from specq.protocol import Failed, num_drafted, num_prompt_bytes


class Ledger:
    """The records on their way to the journal, in order.

    - `trouble`: why the journal cannot be written now, or "".
    - `full`: why the journal has no space for new jobs, or "".
    - `held_until`: until when no other broker has taken a job that this one has, if it can be taken.
    - `num_groups`: groups of records written so far.
    - `write_s`: seconds spent writing them.
    """

    def __init__(self, *, has_journal: bool) -> None:
        self.has_journal = has_journal
        self.sequence = self.settled = 0
        self.trouble = self.full = ""
        self.held_until = 0.0
        self.num_groups, self.write_s = 0, 0.0
        self._marks: deque[tuple[int, BrokerJob, int, bool]] = (
            deque()
        )  # sequence, job, its number of tokens at that time, whether it has ended

    def mark(self, job: BrokerJob, *, ended: bool = False) -> int:
        """Return the sequence number for a record of the job's present state. 0: without a journal."""
        if not self.has_journal:
            job.durable.note(job.transcript.num_tokens, ended=ended)
            return 0
        self.sequence += 1
        self._marks.append((self.sequence, job, job.transcript.num_tokens, ended))
        return self.sequence

    def settle(self, sequence: int) -> list[BrokerJob]:
        """Note that the journal holds all records up to this; return the jobs concerned."""
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
    """Return the record of the job's verifier, and of the weights behind its tokens."""
    return JobBound(job.job_id, job.session.weights, job.session.incarnation)


def crashed_record(job: BrokerJob) -> JobCrashed:
    """Return the record of verifier crashes that count against the job."""
    return JobCrashed(job.job_id, job.crashes)


def added_record(job: BrokerJob, commit: Commit, known: int) -> TokensAdded:
    """Return the record of the new tokens of a verdict."""
    transcript = job.transcript
    base_len = commit.base_len - transcript.prompt_len + known
    logprobs = pack(transcript.logprobs, base_len) if transcript.logprobs.num_top >= 0 else b""
    if not base_len:
        logprobs = transcript.prompt_rows + logprobs
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
        transcript.prompt_rows + pack(transcript.logprobs, 0),
    )


def restored(stored: StoredJob) -> BrokerJob:
    """Make a job from the journal's data."""
    job = BrokerJob(JobRequest(stored.submit, stored.owner, stored.submitted, stored.deadline))
    _restore_text(job, stored)
    job.session.weights, job.session.incarnation = stored.weights, stored.placed
    job.session.base_epoch = stored.epoch
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
    params = job.request.params
    size = num_prompt_bytes(job.request.prompt_len, params)
    transcript.prompt_rows = stored.logprobs[:size]
    transcript.logprobs = unpack(stored.logprobs[size:], params.logprobs)
    transcript.finish, transcript.ended_at = stored.finish, stored.ended
    if stored.code:
        transcript.failure = Failed(job_id=job.job_id, code=stored.code, reason=stored.reason)
