"""Who may work: workers say hello, and are welcomed or refused with the reason."""

from __future__ import annotations

import structlog

from specq.broker.effects import Connect
from specq.broker.state import BrokerState
from specq.broker.workers.placement import Placement
from specq.broker.workers.registry import Worker
from specq.protocol import CAPABILITIES, Hello, ModelInfo, Refused, Welcome, fits, mismatch

log = structlog.get_logger(__name__)


class Registration:
    """The handler of workers' first message; the later ones go to `Heartbeats`."""

    def __init__(self, state: BrokerState, placement: Placement) -> None:
        self.state, self.placement = state, placement

    def hello(self, identity: bytes, message: Hello) -> None:
        """Register a worker, or refuse it with the reason."""
        known = self.state.workers.get(identity)
        if known is None and (reason := self._reason_against(identity, message)):
            by = self.state.roles.peer(identity)
            self.state.faults.note("worker_refused", message.name, reason, self.state.clock.now, by=by)
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
            return "it stood still with work to do; start it anew"
        if message.role not in ("target", "draft"):
            return f"unknown role {message.role!r}; there are target, draft"
        if message.tap_layers and not self.state.roles.trusts(self.state.roles.shown(identity)):
            return "it reads the target's hidden states, which only drafters are sent whose key was made with specq keys --trusted"
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
