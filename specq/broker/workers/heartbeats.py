"""Whether workers are alive, and whether they have the sessions that they should have: what heartbeats and silence say.

Rules: a worker that is silent, or hangs, loses its sessions to others, which continue from the transcript; one that
drains hands them over while there are others. What was lost on the way is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from specq.broker.jobs.job import BrokerJob
from specq.broker.state import BrokerState
from specq.broker.workers.confirmation import PATIENCE, confirm, give_up_on, judge_missing
from specq.broker.workers.placement import Placement
from specq.broker.workers.reconcile import Action, Expected, Reported, reconcile
from specq.broker.workers.registry import Worker
from specq.protocol import Ack, Close, Heartbeat, Refused

log = structlog.get_logger(__name__)


class Heartbeats:
    """The handler of heartbeats, and of workers that send none."""

    def __init__(self, state: BrokerState, placement: Placement) -> None:
        self.state, self.placement = state, placement

    def heartbeat(self, identity: bytes, message: Heartbeat) -> None:
        """Note that a worker lives, and send again what its list of sessions shows to be lost."""
        worker = self.state.workers.get(identity)
        if worker is None:
            self.state.outbox.send_front(identity, Refused(reason="not registered", fatal=False))
            return
        worker.beat(message, self.state.clock.now)
        if message.state in ("leaving", "failed"):
            log.info("worker_left", name=worker.name, role=worker.hello.role, state=message.state)
            if message.state == "failed":
                self._note_fault(worker, "worker_failed", "it reported an error")
            self.placement.lose(worker, crashed=message.state == "failed")
            self.placement.settle()
            return
        if message.state == "draining":
            self.placement.hand_over(worker)
        reported = _sessions(message)
        if worker.hello.role == "target":
            self._apply(worker, reconcile(self._expected(worker), reported))
        else:
            self.placement.drafter_assignment.reconcile(worker, reported)

    def lose_dead(self) -> None:
        """Take their sessions from the workers that were silent for too long, or have not worked though they could."""
        for worker in self.state.workers.dead(self.state.clock.now, self.state.settings.liveness_s):
            hangs = worker.hangs(self.state.settings.liveness_s)
            log.warning("worker_lost", name=worker.name, role=worker.hello.role, hangs=hangs)
            self.state.counts["workers_lost"] += 1
            reason = "it stood still with work to do" if hangs else "it was silent for too long"
            self._note_fault(worker, "worker_lost", reason)
            if hangs:
                self.state.workers.hung.add(worker.hello.incarnation)
            self.placement.lose(worker, crashed=True)
        self.placement.bindings.note_absent()
        self.placement.settle()

    def _note_fault(self, worker: Worker, kind: str, reason: str) -> None:
        by = self.state.roles.peer(worker.identity)
        self.state.faults.note(kind, worker.name, reason, self.state.clock.now, by=by)

    # --- sessions at verifiers --------------------------------------------------------------------------------------

    def _expected(self, verifier: Worker) -> dict[int, Expected]:
        """Return the sessions that a verifier should have."""
        jobs = self.state.jobs.among(verifier.job_ids)
        return {job.job_id: Expected(job.session.epoch, job.transcript.length, job.session.mark) for job in jobs}

    def _apply(self, verifier: Worker, actions: Iterable[Action]) -> None:
        for action in actions:
            job = self.state.jobs.active.get(action.session_id)
            if action.kind == "close":
                self.state.outbox.send_back(verifier.identity, Close(session_id=action.session_id, epoch=action.epoch))
            elif job is None or not job.session.is_at(verifier.identity, action.epoch):
                continue  # an action before this one has moved it
            elif action.kind in ("missing", "lost"):
                self._open_again(job, verifier)
            else:
                self._acknowledge(job, verifier, resend=action.kind == "ahead")

    def _acknowledge(self, job: BrokerJob, verifier: Worker, *, resend: bool) -> None:
        """Send a verifier the length that the journal has of a session; it sends what is beyond again if it shall."""
        confirm(job.session, verifier)
        length = job.transcript.prompt_len + job.durable.num_tokens
        self.state.outbox.send_back(
            verifier.identity, Ack(session_id=job.job_id, epoch=job.session.epoch, length=length, resend=resend)
        )
        job.session.mark.confirm(job.transcript.length)

    def _open_again(self, job: BrokerJob, verifier: Worker) -> None:
        """Send a session again that a heartbeat lacks; one that is never confirmed goes to another verifier."""
        what = judge_missing(job.session, self.state.clock.now, PATIENCE * self.state.settings.liveness_s)
        if what == "open":
            self.placement.open(job, verifier)
        elif what == "give back":
            self.placement.take_from(job, verifier)
            self.placement.give_back(job, give_up_on(job.session, verifier))
            self.placement.place_waiting()


def _sessions(message: Heartbeat) -> dict[int, Reported]:
    """Return the sessions that a heartbeat lists, by id."""
    columns = (message.session_ids.tolist(), message.epochs.tolist(), message.lengths.tolist())
    return {session_id: Reported(epoch, length) for session_id, epoch, length in zip(*columns, strict=False)}
