"""Which verifier holds which job, as the journal has it, and which jobs a verifier's crash counts against.

The journal names the verifier by its incarnation, so that a broker that starts again knows which verifiers must come
back. Until one of that incarnation registers, which clears its jobs, or the time for that is over, which counts as a
crash, they are placed nowhere: a job that crashes verifier and broker together is found as well. A broker or verifier
that stops in good order leaves no job bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.broker.jobs.job import BrokerJob
from specq.broker.jobs.lifecycle import JobState
from specq.broker.jobs.records import bound_record, crashed_record
from specq.broker.state import BrokerState
from specq.broker.workers.quarantine import after_crash, is_given_up
from specq.journal import Crashes


class Bindings:
    """Binds jobs to verifiers, and lets go of them."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._absent: dict[
            int, list[BrokerJob]
        ] = {}  # from before the broker's start, by the incarnation that held them

    def bind(self, job: BrokerJob, weights: str, incarnation: int = 0) -> None:
        """Note in job and journal which weights its text comes from, and the incarnation of the verifier that holds
        it."""
        session = job.session
        if (session.weights, session.incarnation) != (weights, incarnation):
            session.weights, session.incarnation = weights, incarnation
            self.state.record(bound_record(job), job)

    def let_wait(self, job: BrokerJob) -> None:
        """Let a job that no verifier holds any more wait for one, if it is not given up."""
        job.session.verifier = b""
        self.bind(job, job.session.weights)
        if job.state is not JobState.GIVEN_UP:
            self.state.jobs.wait(job)

    def note_crash(self, jobs: Iterable[BrokerJob]) -> None:
        """Count a verifier's crash against each of the jobs that it had, and let them go on elsewhere."""
        jobs = list(jobs)
        for job in jobs:
            self.set_crashes(job, after_crash(job, len(jobs)))
            self.let_wait(job)

    def set_crashes(self, job: BrokerJob, crashes: Crashes) -> None:
        """Note in job and journal the crashes that count against a job; give it up if they are enough."""
        job.crashes = crashes
        self.state.jobs.note_quarantine(job)
        self.state.record(crashed_record(job), job)
        if is_given_up(crashes):
            reason = f"{crashes.total} verifiers died of it, {crashes.lone} of them with nothing else to do"
            self.state.jobs.give_up(job, reason)

    # --- after the broker's own crash ---------------------------------------------------------------------------------

    def restore(self, job: BrokerJob) -> None:
        """Take a job from the journal; one that a verifier held waits for that first."""
        self.state.jobs.add(job, waits=not job.session.incarnation)
        if job.session.incarnation:
            self._absent.setdefault(job.session.incarnation, []).append(job)

    def welcome_back(self, incarnation: int) -> None:
        """Let the jobs of a verifier that has come back go on: it did not crash."""
        for job in _unfinished(self._absent.pop(incarnation, [])):
            self.let_wait(job)

    def note_absent(self) -> None:
        """Count the verifiers that have not come back as crashed, if the time for that is over."""
        if self._absent and not self.state.clock.in_grace:
            lost, self._absent = self._absent, {}
            for jobs in lost.values():
                self.note_crash(_unfinished(jobs))


def _unfinished(jobs: list[BrokerJob]) -> list[BrokerJob]:
    """Leave out what was cancelled, or overdue, meanwhile."""
    return [job for job in jobs if not job.transcript.finish]
