"""A job as the journal's records, and back: each record in one function, and `restored` for all of them together."""

from __future__ import annotations

import numpy as np

from specq.broker.jobs.commits import Commit
from specq.broker.jobs.job import BrokerJob
from specq.broker.jobs.request import JobRequest
from specq.journal import JobBound, JobCrashed, JobEnded, JobTaken, StoredJob, TokensAdded, pack, unpack
from specq.protocol import Failed, num_drafted


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
