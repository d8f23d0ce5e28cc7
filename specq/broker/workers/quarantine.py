"""Which jobs bring verifiers down: told from those that merely were there.

A job that was there when a verifier died, twice, is a suspect. Suspects run alone: one on a verifier, and nothing beside it;
if need be the jobs of one verifier wait meanwhile. One that brings a verifier down alone, twice, is given up. One that gets
well past where it was at the last death is none any more, so that the innocent keep nobody waiting for long.

Pure: what is held against a job in, what is held against it out.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.broker.jobs.job import Job
from specq.broker.workers.registry import Worker
from specq.journal import Crashes

LONE_CRASHES = 2  # after which a job is given up
CLEARED_AFTER = 16  # tokens beyond those that it had at the last death


def after_crash(job: Job, num_jobs: int) -> Crashes:
    """Return what is held against a job when a verifier has died that carried so many."""
    known = job.crashes
    is_lone = job.is_quarantined and num_jobs == 1
    return Crashes(known.total + 1, known.lone + is_lone, len(job.token_ids))


def is_given_up(crashes: Crashes) -> bool:
    return crashes.lone >= LONE_CRASHES


def is_cleared(job: Job) -> bool:
    """Is a suspect past what would have brought the verifier down?"""
    return job.is_quarantined and len(job.token_ids) >= job.crashes.length + CLEARED_AFTER


def open_to(able: Iterable[Worker], isolated: set[bytes], *, alone: bool, quarantined_wait: bool) -> list[Worker]:
    """Return those of the verifiers that may take a job.

    isolated       verifiers that run a suspect: they take nothing else
    alone          the job is a suspect: it needs a verifier without any
    suspects_wait  while they do and none runs, the verifier with the fewest jobs takes no others
    """
    able = [worker for worker in able if worker.has_room]
    free = [worker for worker in able if worker.identity not in isolated]
    if alone:
        return [worker for worker in free if not worker.job_ids]
    if quarantined_wait and len(free) == len(able) and free:
        free.remove(min(free, key=lambda worker: len(worker.job_ids)))
    return free


def to_clear(able: Iterable[Worker], isolated: set[bytes]) -> Worker | None:
    """Return the verifier whose jobs shall wait, so that a suspect can run on it; None if one does already or could."""
    ready = [worker for worker in able if worker.state == "ready"]
    if any(worker.identity in isolated or not worker.job_ids for worker in ready):
        return None
    return min(ready, key=lambda worker: len(worker.job_ids), default=None)
