"""Drafters to sessions: who drafts for which job, and the mending of what drafters missed.

Rule: no two drafters of a job would draft the same.
"""

from __future__ import annotations

from dataclasses import replace

from specq.broker.jobs.job import Job
from specq.broker.state import State
from specq.broker.workers.registry import Worker
from specq.protocol import COLOCATED_LANE, Assign, Release, SamplingParams, Verdict
from specq.verification import strategy


class DrafterAssignment:
    """Gives placed jobs the drafters that they lack."""

    def __init__(self, state: State) -> None:
        self.state = state

    def assign_all(self) -> None:
        for job in self.state.jobs.active.values():
            if job.verifier:
                self.assign_drafters(job)

    def assign_drafters(self, job: Job) -> None:
        """Give a placed job the drafters that it lacks: no two that would draft the same."""
        verifier = self.state.roster.get(job.verifier)
        if verifier is None or not is_drafted(job):
            return
        found = [worker for d in job.drafters.values() if (worker := self.state.roster.get(d)) is not None]
        drafting = {worker.model.fingerprint for worker in found}
        while len(job.drafters) < self.state.drafters_per_job:
            fitting = self.state.roster.drafters_for(verifier.model)
            drafter = self.state.roster.least_loaded(w for w in fitting if w.model.fingerprint not in drafting)
            if drafter is None:
                return
            drafting.add(drafter.model.fingerprint)
            self.assign(job, drafter)

    def assign(self, job: Job, worker: Worker) -> None:
        job.drafters = {lane: d for lane, d in job.drafters.items() if d != worker.identity}
        lane, job.next_lane = job.next_lane, (job.next_lane + 1) % COLOCATED_LANE
        job.drafters[lane] = worker.identity
        job.confirmed[worker.identity] = job.length
        job.missed_by.discard(worker.identity)
        worker.job_ids.add(job.job_id)
        self.state.send_front(
            worker.identity,
            Assign(
                session_id=job.job_id,
                epoch=job.epoch,
                lane=lane,
                prompt_len=job.prompt_len,
                params=drafting_params(job.params),
                speculation=job.speculation,
                token_ids=job.context(),
            ),
        )

    def resume(self, job: Job) -> None:
        """Let a job's drafters go on with its new session."""
        for drafter in list(job.drafters.values()):
            found = self.state.roster.get(drafter)
            if found is not None:
                self.assign(job, found)

    def release(self, job: Job) -> None:
        """Free the drafters of a job that ended."""
        for identity in job.drafters.values():
            drafter = self.state.roster.get(identity)
            if drafter is not None:
                drafter.job_ids.discard(job.job_id)
                self.state.send_front(identity, Release(session_id=job.job_id, epoch=job.epoch))
        job.drafters = {}

    def reconcile(self, worker: Worker, held: dict[int, tuple[int, int]]) -> None:
        for session_id, (epoch, length) in held.items():
            job = self.state.jobs.active.get(session_id)
            if job is None or job.epoch != epoch or worker.identity not in job.drafters.values():
                self.state.send_front(worker.identity, Release(session_id=session_id, epoch=epoch))
            elif job.prompt_len <= length < job.confirmed.get(worker.identity, 0):
                missing = job.context()[length:]
                verdict = Verdict(session_id=session_id, epoch=epoch, base_len=length, token_ids=missing)
                self.state.send_front(worker.identity, verdict)
            if job is not None:
                job.missed_by.discard(worker.identity)
                job.confirmed[worker.identity] = job.length
        for job_id in worker.job_ids - set(held):
            job = self.state.jobs.active.get(job_id)
            if job is not None and worker.identity in job.missed_by:
                self.assign(job, worker)
            elif job is not None:  # the first time, `Assign` may merely be on its way
                job.missed_by.add(worker.identity)


def drafting_params(params: SamplingParams) -> SamplingParams:
    """Return what drafters receive: not the seed where it keys the draws that judge them."""
    return replace(params, seed=0) if strategy(params.strategy).takes_distributions else params


def is_drafted(job: Job) -> bool:
    """Can drafts be of use to a job?"""
    return job.speculation.mode != "plain" and strategy(job.params.strategy).uses_drafts
