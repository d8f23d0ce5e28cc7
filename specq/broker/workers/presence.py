"""Which workers are there, and whether they have the sessions that they should have: what hellos, heartbeats and
silence say; and what no worker has.

Rules: a worker that is silent, or hangs, loses its sessions to others, which continue from the transcript; one that
drains hands them over while there are others. What was lost on the way is sent again.

A session that two heartbeats in a row lack was lost on the way, and is sent again. One that was sent `MAX_OPENS` times,
to a verifier that beats all the while, does not get there at all: its message may be too large for the verifier, or no
message reaches it. That counts as a failure of the session there, and another verifier may try. Ordinary loss fails no
job: with 1% of all messages lost, three `Open`s in a row are lost once in a million, and a job fails only after three
such failures. A slow line is no loss: the session must also be missing for `PATIENCE` times as long as a verifier may
be silent.

Jobs that no verifier can go on with, since none has their model or the weights that their text began with, wait, since
a verifier may come back, but not for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import structlog

from specq.broker.state.job import BrokerJob, JobSession, Requirements, Unconfirmed
from specq.broker.state.memory import BrokerState, Connect
from specq.broker.state.registry import Worker
from specq.broker.workers.placement import Placement
from specq.broker.workers.policy import Action, Expected, Reported, reconcile
from specq.protocol import CAPABILITIES, Ack, Close, Heartbeat, Hello, ModelInfo, Refused, Welcome, fits, mismatch

log = structlog.get_logger(__name__)
MAX_OPENS = 3  # that a verifier may leave unconfirmed, before the session counts as given back
PATIENCE = 2.0  # times `liveness_ms`: so long it must be missing, too
SHOWN = 12  # digits of a fingerprint in texts


class Presence:
    """The handler of hellos and heartbeats, and of workers that send none."""

    def __init__(self, state: BrokerState, placement: Placement) -> None:
        self.state, self.placement = state, placement

    def hello(self, identity: bytes, message: Hello) -> None:
        """Register a worker, or refuse it with the reason."""
        known = self.state.workers.get(identity)
        if known is None and (reason := self._reason_against(identity, message)):
            self._note_fault(identity, "worker_refused", message.name, reason)
            self.state.outbox.send_front(identity, Refused(reason=reason))
            return
        capabilities = CAPABILITIES if message.capabilities else ()  # else it would not read the answer
        beats = self.state.settings.heartbeat_ms
        self.state.outbox.send_front(identity, Welcome(heartbeat_ms=beats, capabilities=capabilities))
        if known is not None:
            known.last_seen = self.state.clock.now
        else:
            self._register(self._worker(identity, message))

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
        """Return why a draft model fits none of the verifiers that there are, or ""; without verifiers, it may fit."""
        targets = [w.model for w in self.state.workers.verifiers()]
        return mismatch(draft, targets) if targets and not any(fits(draft, target) for target in targets) else ""

    def _register(self, worker: Worker) -> None:
        self.state.workers.add(worker)
        self.state.counts["workers_registered"] += 1
        log.info("worker_registered", name=worker.name, role=worker.hello.role, model=worker.model.name)
        if worker.hello.role == "target":
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
        """Refuse drafters that came before any verifier, or whose verifiers are gone, and turn out to fit none."""
        for worker in self.state.workers.drafters():
            if reason := self._mismatch(worker.model):
                self.state.outbox.send_front(worker.identity, Refused(reason=reason))
                self.placement.lose(worker)

    # --- heartbeats, or none ------------------------------------------------------------------------------------------

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
        """Take their sessions from the workers that were silent for too long, or have not worked though they could."""
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


What = Literal["wait", "open", "give back"]


def confirm(session: JobSession, worker: Worker) -> None:
    """Note that a verifier's heartbeat lists a job's session."""
    worker.is_unreachable = False
    if session.unconfirmed.num_opens:
        session.unconfirmed = Unconfirmed()


def judge_missing(session: JobSession, now: float, patience_s: float) -> What:
    """Note that a heartbeat of a job's verifier lacks its session; return what shall be done about it."""
    if session.unconfirmed.verifier != session.verifier or not session.unconfirmed.num_opens:
        session.unconfirmed = Unconfirmed(session.verifier, 1, now)
    if not session.mark.is_missing:  # `Open` may merely be on its way
        session.mark.is_missing = True
        return "wait"
    if session.unconfirmed.num_opens >= MAX_OPENS and now - session.unconfirmed.since >= patience_s:
        return "give back"
    session.unconfirmed.num_opens += 1
    return "open"


def give_up_on(session: JobSession, worker: Worker) -> str:
    """Note that a verifier never confirmed a job's session; return the reason that its client may receive."""
    worker.is_unreachable = True
    session.avoided |= {worker.identity}
    opens, session.unconfirmed = session.unconfirmed.num_opens, Unconfirmed()
    return (
        f"the verifier {worker.name} was sent the session {opens} times and never confirmed it, though it beats: the "
        f"message is too large for it, or messages to {worker.hello.endpoint} do not arrive"
    )


class Unserved:
    """Looks at each tick for what is missing; `patience_s`: how long jobs wait for it, 0: for ever."""

    def __init__(self, state: BrokerState, patience_s: float) -> None:
        self.state, self.patience_s = state, patience_s
        self._since: dict[Requirements, float] = {}

    def given_up(self) -> list[tuple[BrokerJob, str]]:
        """Return the jobs that have waited for too long for what nobody has, and what is missing."""
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
        return any(worker.serves(missing.weights, apart=missing.apart) for worker in verifiers)

    def _reason(self, missing: Requirements) -> str:
        what = f"of the model {missing.model}"
        if missing.weights:
            what += f" with the weights {shown(missing.weights)}, which generated the start of the text,"
        if missing.apart:
            what += " that knows cache_salt"
        served = _served(self.state.workers.verifiers())
        return f"no verifier {what} was available for {self.patience_s:g} s (weights_wait_seconds); {served}"


def _wanted(requirements: Requirements) -> Requirements:
    """Return of a job's requirements what verifiers have or have not: model, weights, whether owners are kept apart."""
    return requirements._replace(alone=False, avoided=frozenset())


def _served(verifiers: Iterable[Worker]) -> str:
    served = sorted({f"{worker.model.name} with {shown(worker.weights)}" for worker in verifiers})
    return f"served: {', '.join(served)}" if served else "none is served"


def shown(weights: str) -> str:
    """Return weights as texts name them."""
    fingerprint, _, dtype = weights.partition(" ")
    return f"{fingerprint[:SHOWN]} {dtype}".rstrip()
