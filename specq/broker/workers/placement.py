"""Which worker does what: liveness, sessions to verifiers.

Rules: a session is opened under a new epoch each time, so that whatever its former verifier still says of it is ignored.
A verifier or drafter that falls silent, or hangs, loses its sessions to others, from the transcript; one that drains hands
them over while there are others. What heartbeats say of each session is compared with the transcript, and what was lost on
the way is sent again.
"""

from __future__ import annotations

import structlog

from specq.broker.jobs.job import Job, Requirements
from specq.broker.state import Disconnect, State
from specq.broker.workers.assignment import DrafterAssignment
from specq.broker.workers.bindings import Bindings
from specq.broker.workers.confirmation import PATIENCE, confirm, give_up_on, judge_missing
from specq.broker.workers.policy import choose, moves
from specq.broker.workers.quarantine import open_to, to_clear
from specq.broker.workers.registry import Worker
from specq.journal import NO_CRASHES
from specq.protocol import Ack, Close, Heartbeat, Open, Refused, SessionFailed

log = structlog.get_logger(__name__)

MAX_FAILURES = 3  # times that verifiers may give a job back before it is given up


class Placement:
    """Handlers of worker messages, and the placing of jobs on workers."""

    def __init__(self, state: State) -> None:
        self.state, self.drafter_assignment = state, DrafterAssignment(state)
        self.bindings = Bindings(state)
        self.given_up = self.bindings.given_up

    # --- workers ----------------------------------------------------------------------------------------------------

    def heartbeat(self, identity: bytes, message: Heartbeat, now: float) -> None:
        """Note that a worker lives, and mend what its list of sessions shows to be lost."""
        worker = self.state.roster.get(identity)
        if worker is None:
            self.state.send_front(identity, Refused(reason="not registered", fatal=False))
            return
        worker.beat(message, now)
        if message.state in ("leaving", "failed"):
            log.info("worker_left", name=worker.name, role=worker.hello.role, state=message.state)
            self.lose(worker, died=message.state == "failed")
            self.settle()
            return
        if message.state == "draining":
            self._hand_over(worker)
        held = {
            session: (epoch, length)
            for session, epoch, length in zip(
                message.session_ids.tolist(), message.epochs.tolist(), message.lengths.tolist(), strict=False
            )
        }
        reconcile = self._reconcile_verifier if worker.hello.role == "target" else self.drafter_assignment.reconcile
        reconcile(worker, held)

    def _reconcile_verifier(self, worker: Worker, held: dict[int, tuple[int, int]]) -> None:
        for session_id, (epoch, length) in held.items():
            job = self.state.jobs.active.get(session_id)
            if job is None or job.verifier != worker.identity or job.epoch != epoch:
                self.state.send_back(worker.identity, Close(session_id=session_id, epoch=epoch))
                continue
            confirm(job, worker)
            behind = job.lagging == job.length < length  # as at the last heartbeat: not merely on its way
            journaled = job.prompt_len + job.journaled
            committed = Ack(session_id=session_id, epoch=epoch, length=journaled, resend=behind)
            self.state.send_back(worker.identity, committed)
            job.lagging = job.length
        for job_id in worker.job_ids - set(held):
            job = self.state.jobs.active.get(job_id)
            if job is not None and job.verifier == worker.identity:
                self._mend_missing(job, worker)

    def _mend_missing(self, job: Job, worker: Worker) -> None:
        """Send a session again that a heartbeat lacks; one that is never confirmed, another verifier shall try."""
        what = judge_missing(job, self.state.now, PATIENCE * self.state.liveness_s)
        if what == "open":
            self._open(job, worker)
        elif what == "give back":
            self._take_from(job, worker)
            self._give_back(job, give_up_on(job, worker))
            self.place_waiting()

    def lose_dead(self, now: float) -> None:
        """Take their sessions from the workers that were not heard for too long, or have not worked though they could."""
        for worker in self.state.roster.dead(now, self.state.liveness_s):
            hangs = worker.hangs(self.state.liveness_s)
            log.warning("worker_lost", name=worker.name, role=worker.hello.role, hangs=hangs)
            self.state.counts["workers_lost"] += 1
            if hangs:
                self.state.hung.add(worker.hello.incarnation)
            self.lose(worker, died=True)
        self.bindings.note_absent()
        self.settle()

    def settle(self) -> None:
        """Place what waits for a verifier, and staff what lacks a drafter."""
        self.place_waiting()
        self.drafter_assignment.assign_all()

    def lose(self, worker: Worker, *, died: bool = False) -> None:
        """Forget a worker; its jobs go to others. Each of a verifier's may be what it `died` of."""
        self.state.roster.remove(worker.identity)
        if worker.hello.role == "target":
            self.state.emit(Disconnect(worker.identity))
        jobs = self._jobs_of(worker)
        if worker.hello.role != "target":
            for job in jobs:
                job.drafters = {lane: d for lane, d in job.drafters.items() if d != worker.identity}
        elif died:
            self.bindings.note_death(jobs)
        else:
            for job in jobs:
                self.bindings.let_wait(job)

    def clear(self, job: Job) -> None:
        """Let a suspect that went on well be a job like others, and others run beside it."""
        self.bindings.hold_against(job, NO_CRASHES)
        self.place_waiting()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def place_waiting(self) -> None:
        """Open jobs that wait, in the queue's order, while there is room."""
        while (
            found := self.state.jobs.queue.take(self._places_for, self.state.wall)
        ) is not None or self._clear_for_quarantined():
            if found is not None:
                job, able = found
                self._open(job, self._best_of(job, able))
                self.drafter_assignment.assign_drafters(job)

    def _places_for(self, requirements: Requirements) -> list[Worker] | None:
        """Return the verifiers with room that have what a job wants; None if there are none."""
        quarantined_wait = any(
            quarantined.model == requirements.model for quarantined in self.state.jobs.queue.quarantined_jobs()
        )
        isolated = self.state.jobs.isolated()
        return (
            open_to(self._able(requirements), isolated, alone=requirements.alone, quarantined_wait=quarantined_wait)
            or None
        )

    def _able(self, requirements: Requirements) -> list[Worker]:
        """Return the verifiers that have what a job wants, with room or without."""
        able = [w for w in self.state.roster.verifiers(requirements.model) if w.has_weights(requirements.weights)]
        return [w for w in able if w.identity not in requirements.avoided] or able

    def _clear_for_quarantined(self) -> bool:
        """Let the jobs of a verifier wait, if suspects do and it is the best to run them on; False if that is not needed."""
        for requirements in self.state.jobs.queue.quarantined_jobs():
            worker = to_clear(self._able(requirements), self.state.jobs.isolated())
            if worker is not None:
                for job in self._jobs_of(worker):
                    self._take_from(job, worker)
                    self.bindings.let_wait(job)
                return True
        return False

    def _jobs_of(self, worker: Worker) -> list[Job]:
        return [job for i in worker.job_ids if (job := self.state.jobs.active.get(i)) is not None]

    def _best_of(self, job: Job, able: list[Worker]) -> Worker:
        return choose(able, job.length + job.tokens_left, job.prefix_keys)

    def _hand_over(self, worker: Worker) -> None:
        """Let others go on with what a verifier has that is about to leave; what finds no place ends there."""
        for job in self._jobs_of(worker):
            able = self._places_for(job.requirements)
            if able is not None:
                self._move(job, self._best_of(job, able))

    def rebalance(self, now: float) -> None:
        """Let verifiers that have joined share in the work."""
        if len(self.state.jobs.queue):
            return
        for alike in self.state.roster.alike():
            isolated = self.state.jobs.isolated()
            able = [
                w
                for w in alike
                if w.identity not in isolated and not w.is_deaf and w.heard >= now - 2 * self.state.heartbeat_ms / 1000
            ]
            for job, to in moves(able, [job for w in able for job in self._jobs_of(w)], now):
                self._move(job, to)

    def _move(self, job: Job, to: Worker) -> None:
        """Let another verifier go on with a job."""
        former = self.state.roster.get(job.verifier)
        if former is not None:
            self._take_from(job, former)
        self.state.counts["moved"] += 1
        job.moved_at = self.state.now
        self._open(job, to)

    def _take_from(self, job: Job, worker: Worker) -> None:
        worker.job_ids.discard(job.job_id)
        job.verifier = b""
        self.state.send_back(worker.identity, Close(session_id=job.job_id, epoch=job.epoch))

    def _open(self, job: Job, worker: Worker) -> None:
        job.verifier, job.epoch, job.unheld, job.lagging = worker.identity, self.state.next_epoch(), False, -1
        job.resumed = True
        worker.job_ids.add(job.job_id)
        worker.take(job.length + job.tokens_left, job.prefix_keys)
        self.bindings.bind(job, worker.weights, worker.hello.incarnation)
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
        self.drafter_assignment.resume(job)

    def open_anew(self, job: Job) -> None:
        """Let a job's verifier begin its session again, without the drafts that it has."""
        verifier = self.state.roster.get(job.verifier)
        if verifier is not None:
            self._open(job, verifier)

    def drafted_by(self, worker: Worker) -> list[Job]:
        """Return the jobs that a drafter drafts for."""
        return [job for job in self._jobs_of(worker) if worker.identity in job.drafters.values()]

    def release(self, job: Job) -> None:
        """Free the workers of a job that ended."""
        verifier = self.state.roster.get(job.verifier)
        if verifier is not None:
            self._take_from(job, verifier)
        job.verifier = b""
        self.drafter_assignment.release(job)

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
            self.bindings.let_wait(job)
