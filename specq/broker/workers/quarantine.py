"""Which jobs crash verifiers, and which merely were there when one crashed.

A job that was there when a verifier crashed, twice, is in quarantine: it runs alone, one such job on a verifier and
nothing beside it; if need be the other jobs of a verifier wait meanwhile. One that crashes a verifier alone, twice, is
given up. One that gets well past where it was at the last crash is cleared, so that harmless jobs keep nobody waiting
for long.

Pure: what counts against a job in, what counts against it out.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.broker.jobs.job import BrokerJob
from specq.broker.workers.registry import Worker
from specq.journal import Crashes

LONE_CRASHES = 2  # after which a job is given up


def after_crash(job: BrokerJob, num_jobs: int) -> Crashes:
    """Return what counts against a job after a crash of a verifier that carried `num_jobs`."""
    is_lone = job.is_quarantined and num_jobs == 1
    return Crashes(job.crashes.total + 1, job.crashes.lone + is_lone, job.transcript.num_tokens)


def is_given_up(crashes: Crashes) -> bool:
    return crashes.lone >= LONE_CRASHES


def open_to(able: Iterable[Worker], isolated: set[bytes], *, alone: bool, quarantined_wait: bool) -> list[Worker]:
    """Return those of the verifiers that may take a job.

    isolated          verifiers that run a job in quarantine: they take nothing else
    alone             the job is in quarantine: it needs a verifier without any
    quarantined_wait  jobs in quarantine wait: while none runs, the verifier with the fewest jobs takes no others
    """
    able = [worker for worker in able if worker.has_room]
    free = [worker for worker in able if worker.identity not in isolated]
    if alone:
        return [worker for worker in free if not worker.job_ids]
    if quarantined_wait and len(free) == len(able) and free:
        free.remove(min(free, key=lambda worker: len(worker.job_ids)))
    return free


def to_clear(able: Iterable[Worker], isolated: set[bytes]) -> Worker | None:
    """Return the verifier whose jobs shall wait, so that one in quarantine can run there; None if one does or could
    already."""
    ready = [worker for worker in able if worker.state == "ready"]
    if any(worker.identity in isolated or not worker.job_ids for worker in ready):
        return None
    return min(ready, key=lambda worker: len(worker.job_ids), default=None)
