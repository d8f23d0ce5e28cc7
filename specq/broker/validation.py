"""Invariants of the broker's memory, checked after each message and tick (tests, chaos runs)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from specq.broker.state.job import BrokerJob, JobState
from specq.broker.state.memory import BrokerState

_ACTIVE = {JobState.ABSENT, JobState.WAITING, JobState.RUNNING}


def validate(state: BrokerState) -> None:
    """Check all invariants.

    Raises AssertionError with a list of all contradictions.
    """
    found = [*_jobs(state), *_workers(state), *_counts(state)]
    assert not found, "; ".join(found)


def _jobs(state: BrokerState) -> Iterator[str]:
    for job in state.jobs.active.values():
        if job.state not in _ACTIVE:
            yield f"job {job.job_id} is active and {job.state}"
        if job.transcript.finish:
            yield f"job {job.job_id} is active and has ended: {job.transcript.finish}"
        if (job.state is JobState.WAITING) != (job in state.jobs.queue):
            yield f"job {job.job_id} is {job.state}, and in the queue: {job in state.jobs.queue}"
        yield from _session(state, job)
    for job in state.jobs.finished.values():
        if job.state is not JobState.ENDED or not job.transcript.finish:
            yield f"job {job.job_id} is among the finished and {job.state}"
        if job.session.verifier:
            yield f"job {job.job_id} has ended and has a verifier"


def _session(state: BrokerState, job: BrokerJob) -> Iterator[str]:
    """Check that a running job has a registered verifier that can serve it and holds it. Its drafters hold it, too.

    No other job has a verifier.
    """
    worker = state.workers.get(job.session.verifier)
    if (job.state is JobState.RUNNING) != bool(job.session.verifier):
        yield f"job {job.job_id} is {job.state}, and its verifier is {job.session.verifier!r}"
    elif job.state is JobState.RUNNING and (worker is None or job.job_id not in worker.job_ids):
        yield f"job {job.job_id} runs at a verifier that does not have it"
    elif worker is not None and not job.request.capabilities <= worker.capabilities:
        yield f"job {job.job_id} runs at the verifier {worker.name}, which lacks a capability that it needs"
    for drafter in job.drafters.identities():
        if (worker := state.workers.get(drafter)) is None or job.job_id not in worker.job_ids:
            yield f"job {job.job_id} has a lane of the drafter {drafter!r}, which does not have it"
    if job.durable.num_tokens > job.transcript.num_tokens:
        yield f"job {job.job_id} has {job.transcript.num_tokens} tokens, and the journal {job.durable.num_tokens}"


def _workers(state: BrokerState) -> Iterator[str]:
    for worker in state.workers.verifiers():
        for job_id in worker.job_ids:
            job = state.jobs.active.get(job_id)
            if job is None or job.session.verifier != worker.identity:
                yield f"verifier {worker.name} has job {job_id}, which is not there"
    for worker in state.workers.drafters():
        for job in state.jobs.among(worker.job_ids):
            if worker.identity not in job.drafters.identities():
                yield f"drafter {worker.name} has job {job.job_id}, which does not know of it"


def _counts(state: BrokerState) -> Iterator[str]:
    """Check the sums over the active jobs."""
    jobs = state.jobs
    if jobs.num_tokens != sum(job.request.max_length + job.request.attached_size for job in jobs.active.values()):
        yield f"{jobs.num_tokens} tokens are counted of the active jobs"
    if jobs.held != Counter(job.request.bucket for job in jobs.active.values()):
        yield f"jobs by bucket are counted as {dict(jobs.held)}"
    if state.ledger.settled > state.ledger.sequence:
        yield f"the journal has {state.ledger.settled} of {state.ledger.sequence} records"
    if jobs.given_up:
        yield f"{len(jobs.given_up)} jobs were given up and have not failed"
