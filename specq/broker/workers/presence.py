"""Which workers are present, and whether they have their sessions, by hellos, heartbeats and silence.

It also finds jobs that no worker can serve.

Rules: a worker that is silent or hangs loses its sessions. Others continue them from the transcript. A draining worker
hands them over if there are others. Lost messages are sent again.

A session that two heartbeats in a row lack was lost. It is sent again. If `MAX_OPENS` attempts fail while the verifier
sends heartbeats, the session cannot reach it. The message may be too large for the verifier, or no message reaches it.
That counts as a failure of the session there, and another verifier may try. Ordinary loss fails no job. With 1% of all
messages lost, three `Open`s in a row are lost once in a million. A job fails only after three such failures. A slow
line is not a loss. The session must also be missing for `PATIENCE` times the allowed silence of a verifier.

A job waits if no verifier has its model or the weights behind its text. A verifier may come back, so the job waits, but
only for a limited time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import structlog

from specq.broker.state.job import BrokerJob, JobSession, Requirements, Unconfirmed
from specq.broker.state.memory import BrokerState, Connect
from specq.broker.state.registry import Worker, ability
from specq.broker.workers.assignment import Action, Expected, Reported, reconcile
from specq.broker.workers.placement import Placement
from specq.protocol import (
    BROKER_CAPABILITIES,
    SEVERAL_BROKERS,
    Ack,
    Brokers,
    Close,
    Heartbeat,
    Hello,
    ModelInfo,
    Refused,
    Welcome,
    fits,
    mismatch,
)

log = structlog.get_logger(__name__)
MAX_OPENS = 3  # unconfirmed by a verifier, before the session counts as given back
PATIENCE = 2.0  # times `liveness_ms`: the session must be missing for this long, too
SHOWN = 12  # digits of a fingerprint in texts


class Presence:
    """Handles hellos and heartbeats, and workers that send none."""

    def __init__(self, state: BrokerState, placement: Placement) -> None:
        self.state, self.placement = state, placement

    def hello(self, identity: bytes, message: Hello) -> None:
        """Register a worker, or refuse it with a reason."""
        known = self.state.workers.get(identity)
        if known is None and (reason := self._reason_against(identity, message)):
            self._note_fault(identity, "worker_refused", message.name, reason)
            self.state.outbox.send_front(identity, Refused(reason=reason))
            return
        capabilities = BROKER_CAPABILITIES if message.capabilities else ()  # else it cannot read the answer
        beats = self.state.settings.heartbeat_ms
        self.state.outbox.send_front(identity, Welcome(heartbeat_ms=beats, capabilities=capabilities))
        worker = known or self._worker(identity, message)
        self.send_brokers(worker)
        if known is not None:
            known.last_seen = self.state.clock.now
        else:
            self._register(worker)

    def send_brokers(self, worker: Worker) -> None:
        """Send a worker this broker's address, and those of all brokers of a journal for several."""
        if SEVERAL_BROKERS in worker.capabilities:
            brokers = Brokers(addresses=self.state.brokers, own=self.state.address)
            self.state.outbox.send_front(worker.identity, brokers)

    def _reason_against(self, identity: bytes, message: Hello) -> str:
        """Return why a worker cannot be registered, or ""."""
        if message.incarnation in self.state.workers.hung:
            return "it made no progress although it had work; restart it"
        if message.role not in ("target", "draft"):
            return f"unknown role {message.role!r}; known: target, draft"
        if message.tap_layers and not self.state.roles.trusts(self.state.roles.shown(identity)):
            trusted = "only drafters are sent whose key was made with specq keys --trusted"
            return f"it reads the target's hidden states, which {trusted}"
        return self._mismatch(message.model) if message.role == "draft" else ""

    def _mismatch(self, draft: ModelInfo) -> str:
        """Return why a draft model fits none of the present verifiers, or "". Without verifiers, it may fit."""
        targets = [w.model for w in self.state.workers.verifiers()]
        return mismatch(draft, targets) if targets and not any(fits(draft, target) for target in targets) else ""

    def _register(self, worker: Worker) -> None:
        self.state.workers.add(worker)
        self.state.counts["workers_registered"] += 1
        log.info("worker_registered", name=worker.name, role=worker.hello.role, model=worker.model.name)
        if worker.hello.role == "target":
            if not worker.dials_out:
                self.state.outbox.add(Connect(worker.identity, worker.hello.endpoint))
            self.placement.bindings.welcome_back(worker.hello.incarnation)
            self._refuse_misfits()
            self.placement.place_waiting()
        self.placement.drafter_assignment.assign_all()

    def _worker(self, identity: bytes, message: Hello) -> Worker:
        shown, now = self.state.roles.shown(identity), self.state.clock.now
        return Worker(
            identity,
            message,
            last_seen=now,
            shown=shown,
            is_trusted=self.state.roles.trusts(shown),
            joined_at=now,
            progressed=now,
            free_slots=message.model.kv_slots,
        )

    def _refuse_misfits(self) -> None:
        """Refuse drafters that registered without a verifier, if they fit no present one."""
        for worker in self.state.workers.drafters():
            if reason := self._mismatch(worker.model):
                self.state.outbox.send_front(worker.identity, Refused(reason=reason))
                self.placement.lose(worker)

    # --- heartbeats, or none ------------------------------------------------------------------------------------------

    def heartbeat(self, identity: bytes, message: Heartbeat) -> None:
        """Note that a worker is alive, and send again the sessions that its heartbeat lacks."""
        worker = self.state.workers.get(identity)
        if worker is None:
            self.state.outbox.send_front(identity, Refused(reason="not registered", fatal=False))
            return
        worker.beat(message, self.state.clock.now, len(self.state.brokers))
        if message.state in ("leaving", "failed"):
            log.info("worker_left", name=worker.name, role=worker.hello.role, state=message.state)
            if message.state == "failed":
                self._note_fault(identity, "worker_failed", worker.name, "it reported an error")
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
        """Take the sessions from workers that were silent for too long, or made no progress although they had work."""
        for worker in self.state.workers.dead(self.state.clock.now, self.state.settings.liveness_s):
            hangs = worker.hangs(self.state.settings.liveness_s)
            log.warning("worker_lost", name=worker.name, role=worker.hello.role, hangs=hangs)
            self.state.counts["workers_lost"] += 1
            reason = "it made no progress although it had work" if hangs else "it sent nothing for too long"
            self._note_fault(worker.identity, "worker_lost", worker.name, reason)
            if hangs:
                self.state.workers.hung.add(worker.hello.incarnation)
            self.placement.lose(worker, crashed=True)
        self.placement.bindings.note_absent()
        self.placement.settle()

    def _note_fault(self, identity: bytes, kind: str, name: str, reason: str) -> None:
        self.state.faults.note(kind, name, reason, self.state.clock.now, by=self.state.roles.peer(identity))

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
        """Send a verifier the journaled length of a session. With `resend`, it sends the tokens beyond it again."""
        confirm(job.session, verifier)
        length = job.transcript.prompt_len + job.durable.num_tokens
        self.state.outbox.send_back(
            verifier.identity, Ack(session_id=job.job_id, epoch=job.session.epoch, length=length, resend=resend)
        )
        job.session.mark.confirm(job.transcript.length)

    def _open_again(self, job: BrokerJob, verifier: Worker) -> None:
        """Open a session again that a heartbeat lacks. If it is never confirmed, give it to another verifier."""
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


What = Literal["wait", "open", "give back"]


def confirm(session: JobSession, worker: Worker) -> None:
    """Note that a verifier's heartbeat lists a job's session."""
    worker.is_unreachable = False
    if session.unconfirmed.num_opens:
        session.unconfirmed = Unconfirmed()


def judge_missing(session: JobSession, now: float, patience_s: float) -> What:
    """Note that a heartbeat of a job's verifier lacks its session; return the action."""
    if session.unconfirmed.verifier != session.verifier or not session.unconfirmed.num_opens:
        session.unconfirmed = Unconfirmed(session.verifier, 1, now)
    if not session.mark.is_missing:  # `Open` may still be on its way
        session.mark.is_missing = True
        return "wait"
    if session.unconfirmed.num_opens >= MAX_OPENS and now - session.unconfirmed.since >= patience_s:
        return "give back"
    session.unconfirmed.num_opens += 1
    return "open"


def give_up_on(session: JobSession, worker: Worker) -> str:
    """Note that a verifier never confirmed a job's session; return the reason for its client."""
    worker.is_unreachable = True
    session.avoided |= {worker.identity}
    opens, session.unconfirmed = session.unconfirmed.num_opens, Unconfirmed()
    return (
        f"the verifier {worker.name} was sent the session {opens} times and never confirmed it, though it beats: the "
        f"message is too large for it, or messages to {worker.hello.endpoint or 'it'} do not arrive"
    )


class Unserved:
    """Finds jobs that no verifier can serve, at each tick. `patience_s`: how long they wait. 0: without limit."""

    def __init__(self, state: BrokerState, patience_s: float) -> None:
        self.state, self.patience_s = state, patience_s
        self._since: dict[Requirements, float] = {}

    def given_up(self) -> list[tuple[BrokerJob, str]]:
        """Return jobs that have waited too long for a verifier, and what is missing."""
        now = self.state.clock.now
        wanted = set(map(_wanted, self.state.jobs.queue.requirements()))
        self._since = {one: self._since.get(one, now) for one in wanted if not self._is_served(one)}
        late = {one for one, since in self._since.items() if self.patience_s and now - since >= self.patience_s}
        if not late:
            return []
        waiting = [job for job in self.state.jobs.active.values() if not job.session.verifier]
        return [(job, self._reason(found)) for job in waiting if (found := _wanted(job.requirements)) in late]

    def _is_served(self, missing: Requirements) -> bool:
        verifiers = self.state.workers.verifiers(missing.model)
        return any(worker.serves(missing) for worker in verifiers)

    def _reason(self, missing: Requirements) -> str:
        what = f"of the model {missing.model}"
        if missing.weights:
            what += f" with the weights {shown(missing.weights)}, which generated the start of the text,"
        if missing.capabilities:
            what += f" that {' and '.join(map(ability, sorted(missing.capabilities)))}"
        served = _served(self.state.workers.verifiers())
        return f"no verifier {what} was available for {self.patience_s:g} s (weights_wait_seconds); {served}"


def _wanted(requirements: Requirements) -> Requirements:
    """Return the requirements that depend on verifiers: model, weights, and capabilities."""
    return requirements._replace(alone=False, avoided=frozenset())


def _served(verifiers: Iterable[Worker]) -> str:
    served = sorted({f"{worker.model.name} with {shown(worker.weights)}" for worker in verifiers})
    return f"served: {', '.join(served)}" if served else "none is served"


def shown(weights: str) -> str:
    """Return weights in the form that texts use."""
    fingerprint, _, dtype = weights.partition(" ")
    return f"{fingerprint[:SHOWN]} {dtype}".rstrip()
