"""Which worker does what: registration, liveness, sessions to verifiers, drafters to sessions.

Rules: a session is opened under a new epoch each time, so that whatever its former verifier still says of it is ignored.
A verifier or drafter that falls silent loses its sessions to others, from the transcript. What heartbeats say of each
session is compared with the transcript, and what was lost on the way is sent again.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from specq.broker.jobs import Job, Wants
from specq.broker.roster import Worker, fits, mismatch
from specq.broker.state import Connect, Disconnect, State
from specq.journal.records import JobBound
from specq.messages import (
    OWN_LANE,
    Assign,
    Close,
    Committed,
    Heartbeat,
    Hello,
    Open,
    Refused,
    Release,
    SessionFailed,
    Verdict,
    Welcome,
)
from specq.params import SamplingParams

log = structlog.get_logger(__name__)

MAX_FAILURES = 3  # verifiers that may die with a job, or give it back, before it is given up


class Placement:
    """Handlers of worker messages, and the placing of jobs on workers."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.given_up: list[tuple[Job, str]] = []  # jobs that no verifier can go on with, and why

    # --- workers ----------------------------------------------------------------------------------------------------

    def hello(self, identity: bytes, message: Hello, now: float) -> None:
        """Register a worker, or refuse it with the reason."""
        if self.state.roster.get(identity) is not None:
            return
        if message.role not in ("target", "draft"):
            self.state.send_front(identity, Refused(reason=f"unknown role {message.role!r}; there are target, draft"))
            return
        worker = Worker(identity, message, now)
        targets = [w.model for w in self.state.roster.verifiers()]
        if message.role == "draft" and targets and not any(fits(message.model, target) for target in targets):
            self.state.send_front(identity, Refused(reason=mismatch(message.model, targets)))
            return
        self.state.roster.add(worker)
        self.state.send_front(identity, Welcome(heartbeat_ms=self.state.heartbeat_ms))
        log.info("worker_registered", name=worker.name, role=message.role, model=worker.model.name)
        if message.role == "target":
            self.state.emit(Connect(identity, message.endpoint))
            self._refuse_misfits()
            self.place_waiting()
        self._staff_all()

    def _refuse_misfits(self) -> None:
        """Refuse drafters that came before any verifier and turn out to fit none."""
        targets = [w.model for w in self.state.roster.verifiers()]
        for worker in self.state.roster.drafters():
            if not any(fits(worker.model, target) for target in targets):
                self.state.send_front(worker.identity, Refused(reason=mismatch(worker.model, targets)))
                self.state.roster.remove(worker.identity)

    def heartbeat(self, identity: bytes, message: Heartbeat, now: float) -> None:
        """Note that a worker lives, and mend what its list of sessions shows to be lost."""
        worker = self.state.roster.get(identity)
        if worker is None:
            self.state.send_front(identity, Refused(reason="not registered", fatal=False))
            return
        worker.heard = now
        worker.beat(message)
        if message.state == "leaving":
            log.info("worker_left", name=worker.name, role=worker.hello.role)
            self.lose(worker)
            self.settle()
            return
        held = {
            session: (epoch, length)
            for session, epoch, length in zip(
                message.session_ids.tolist(), message.epochs.tolist(), message.lengths.tolist(), strict=False
            )
        }
        mend = self._mend_verifier if worker.hello.role == "target" else self._mend_drafter
        mend(worker, held)

    def _mend_verifier(self, worker: Worker, held: dict[int, tuple[int, int]]) -> None:
        for session_id, (epoch, length) in held.items():
            job = self.state.jobs.active.get(session_id)
            if job is None or job.verifier != worker.identity or job.epoch != epoch:
                self.state.send_back(worker.identity, Close(session_id=session_id, epoch=epoch))
                continue
            behind = job.lagging == job.length < length  # as at the last heartbeat: not merely on its way
            journaled = job.prompt_len + job.journaled
            committed = Committed(session_id=session_id, epoch=epoch, length=journaled, resend=behind)
            self.state.send_back(worker.identity, committed)
            job.lagging = job.length
        for job_id in worker.job_ids - set(held):
            job = self.state.jobs.active.get(job_id)
            if job is not None and job.unheld:
                self._open(job, worker)
            elif job is not None:
                job.unheld = True

    def _mend_drafter(self, worker: Worker, held: dict[int, tuple[int, int]]) -> None:
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
                self._assign(job, worker)
            elif job is not None:  # the first time, `Assign` may merely be on its way
                job.missed_by.add(worker.identity)

    def lose_silent(self, now: float) -> None:
        """Take their sessions from the workers that were not heard for too long."""
        for worker in self.state.roster.silent(now - self.state.liveness_s):
            log.warning("worker_lost", name=worker.name, role=worker.hello.role)
            self.state.counts["workers_lost"] += 1
            self.lose(worker)
        self.settle()

    def settle(self) -> None:
        """Place what waits for a verifier, and staff what lacks a drafter."""
        self.place_waiting()
        self._staff_all()

    def lose(self, worker: Worker) -> None:
        """Forget a worker; its jobs go to others."""
        self.state.roster.remove(worker.identity)
        if worker.hello.role == "target":
            self.state.emit(Disconnect(worker.identity))
        for job_id in list(worker.job_ids):
            job = self.state.jobs.active.get(job_id)
            if job is None:
                continue
            if worker.hello.role == "target":
                self._give_back(job, f"verifier {worker.name} was lost")
            else:
                job.drafters = {lane: d for lane, d in job.drafters.items() if d != worker.identity}

    # --- sessions ---------------------------------------------------------------------------------------------------

    def place_waiting(self) -> None:
        """Open jobs that wait, in the queue's order, while there is room."""
        while (found := self.state.jobs.queue.take(self._place_for)) is not None:
            job, worker = found
            self._open(job, worker)
            self._staff(job)

    def _place_for(self, wants: Wants) -> Worker | None:
        """Return the verifier with room that has what a job wants."""
        able = self.state.roster.verifiers(wants.model)
        return self.state.roster.least_loaded(w for w in able if wants.weights in ("", w.weights))

    def _open(self, job: Job, worker: Worker) -> None:
        job.verifier, job.epoch, job.unheld, job.lagging = worker.identity, self.state.next_epoch(), False, -1
        job.resumed = True
        worker.job_ids.add(job.job_id)
        if job.weights != worker.weights:
            job.weights = worker.weights
            self.state.record(JobBound(job.job_id, job.weights), job)
        self.state.send_back(
            worker.identity,
            Open(
                session_id=job.job_id,
                epoch=job.epoch,
                prompt_len=job.prompt_len,
                tokens_left=job.tokens_left,
                params=job.params,
                speculation=job.speculation,
                token_ids=job.context(),
            ),
        )
        for drafter in list(job.drafters.values()):
            found = self.state.roster.get(drafter)
            if found is not None:
                self._assign(job, found)

    def _staff_all(self) -> None:
        for job in self.state.jobs.active.values():
            if job.verifier:
                self._staff(job)

    def _staff(self, job: Job) -> None:
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
            self._assign(job, drafter)

    def _assign(self, job: Job, worker: Worker) -> None:
        job.drafters = {lane: d for lane, d in job.drafters.items() if d != worker.identity}
        lane, job.next_lane = job.next_lane, (job.next_lane + 1) % OWN_LANE
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

    def release(self, job: Job) -> None:
        """Free the workers of a job that ended."""
        verifier = self.state.roster.get(job.verifier)
        if verifier is not None:
            verifier.job_ids.discard(job.job_id)
            self.state.send_back(job.verifier, Close(session_id=job.job_id, epoch=job.epoch))
        for identity in job.drafters.values():
            drafter = self.state.roster.get(identity)
            if drafter is not None:
                drafter.job_ids.discard(job.job_id)
                self.state.send_front(identity, Release(session_id=job.job_id, epoch=job.epoch))
        job.verifier, job.drafters = b"", {}

    def session_failed(self, verifier: bytes, message: SessionFailed, now: float) -> None:
        """A verifier cannot go on with a session: try another, or fail the job."""
        job = self.state.jobs.active.get(message.session_id)
        if job is None or job.verifier != verifier or job.epoch != message.epoch:
            return
        worker = self.state.roster.get(verifier)
        if worker is not None:
            worker.job_ids.discard(job.job_id)
        if message.retry:
            self._give_back(job, message.reason)
            self.place_waiting()
        else:
            self.given_up.append((job, message.reason))

    def _give_back(self, job: Job, reason: str) -> None:
        job.verifier = b""
        job.failures += 1
        if job.failures >= MAX_FAILURES:
            self.given_up.append((job, f"given up after {job.failures} failures; the last: {reason}"))
        else:
            self.state.jobs.queue.add(job)


def drafting_params(params: SamplingParams) -> SamplingParams:
    """Return what drafters are told: under `probabilistic` not the seed, since it keys the draws that judge them."""
    return replace(params, seed=0) if params.strategy == "probabilistic" else params


def is_drafted(job: Job) -> bool:
    """Can drafts be of use to a job?"""
    return job.speculation.mode != "plain" and job.params.strategy != "greedy"
