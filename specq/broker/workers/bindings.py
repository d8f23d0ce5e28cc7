"""Which verifier holds which job, as the journal has it, and what a verifier's death holds against its jobs.

The journal names the verifier by its incarnation, so that a broker that starts again knows which verifiers must come back.
Until one of that incarnation registers, which clears its jobs, or the time for that is over, which is its death, they are
placed nowhere: what brings down verifier and broker together is found out as well. A broker or verifier that stops in good
order leaves no job bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.broker.jobs.job import Job
from specq.broker.state import State
from specq.broker.workers.quarantine import after_crash, is_given_up
from specq.journal import Crashes, JobBound


class Bindings:
    """Binds jobs to verifiers, and lets go of them. `given_up`: jobs that no verifier can go on with, and why."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.given_up: list[tuple[Job, str]] = []
        self._absent: dict[int, list[Job]] = {}  # of the broker's former life, by the incarnation that held them

    def bind(self, job: Job, weights: str, placed: int = 0) -> None:
        """Note in job and journal which weights its text comes from, and the incarnation of the verifier that holds it."""
        if (job.weights, job.placed) != (weights, placed):
            job.weights, job.placed = weights, placed
            self.state.record(JobBound(job.job_id, weights, placed), job)

    def let_wait(self, job: Job) -> None:
        """Let a job that no verifier holds any more wait for one, if it is not given up."""
        job.verifier = b""
        self.bind(job, job.weights)
        if not is_given_up(job.crashes):
            self.state.jobs.queue.add(job)

    def note_death(self, jobs: Iterable[Job]) -> None:
        """Hold a verifier's death against each of the jobs that it had, and let them go on elsewhere."""
        jobs = list(jobs)
        for job in jobs:
            self.hold_against(job, after_crash(job, len(jobs)))
            self.let_wait(job)

    def hold_against(self, job: Job, crashes: Crashes) -> None:
        """Note in job and journal what is held against a job; give it up if that is enough."""
        job.crashes = crashes
        self.state.jobs.note_quarantine(job)
        self.state.record(job.crashed(), job)
        if is_given_up(crashes):
            self.given_up.append(
                (job, f"{crashes.total} verifiers died of it, {crashes.lone} of them with nothing else to do")
            )

    # --- after the broker's own death ---------------------------------------------------------------------------------

    def restore(self, job: Job) -> None:
        """Take a job from the journal; one that a verifier held waits for that first."""
        self.state.jobs.add(job, waits=not job.placed)
        if job.placed:
            self._absent.setdefault(job.placed, []).append(job)

    def welcome_back(self, incarnation: int) -> None:
        """Clear the jobs of a verifier that has come back: it did not die of them."""
        for job in _unfinished(self._absent.pop(incarnation, [])):
            self.let_wait(job)

    def note_absent(self) -> None:
        """Take for dead the verifiers that have not come back, if the time for that is over."""
        if self._absent and not self.state.in_grace:
            lost, self._absent = self._absent, {}
            for jobs in lost.values():
                self.note_death(_unfinished(jobs))


def _unfinished(jobs: list[Job]) -> list[Job]:
    """Leave out what was cancelled, or overdue, meanwhile."""
    return [job for job in jobs if not job.finish]
