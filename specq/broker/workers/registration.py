"""Who may work: workers say hello, and are welcomed or refused with the reason."""

from __future__ import annotations

import structlog

from specq.broker.effects import Connect
from specq.broker.state import State
from specq.broker.workers.placement import Placement
from specq.broker.workers.registry import Worker, fits, mismatch
from specq.protocol import Hello, Refused, Welcome

log = structlog.get_logger(__name__)


class Registration:
    """The handler of workers' first message; what they say later goes to `Placement`."""

    def __init__(self, state: State, placement: Placement) -> None:
        self.state, self.placement = state, placement

    def hello(self, identity: bytes, message: Hello) -> None:
        """Register a worker, or refuse it with the reason."""
        known = self.state.workers.get(identity)
        if known is not None:
            known.last_seen = self.state.clock.now
            self.state.outbox.send_front(identity, Welcome(heartbeat_ms=self.state.settings.heartbeat_ms))
            return
        if message.incarnation in self.state.workers.hung:
            self.state.outbox.send_front(identity, Refused(reason="it stood still with work to do; start it anew"))
            return
        if message.role not in ("target", "draft"):
            self.state.outbox.send_front(
                identity, Refused(reason=f"unknown role {message.role!r}; there are target, draft")
            )
            return
        worker = self._worker(identity, message)
        targets = [w.model for w in self.state.workers.verifiers()]
        if message.role == "draft" and targets and not any(fits(message.model, target) for target in targets):
            self.state.outbox.send_front(identity, Refused(reason=mismatch(message.model, targets)))
            return
        self.state.workers.add(worker)
        self.state.outbox.send_front(identity, Welcome(heartbeat_ms=self.state.settings.heartbeat_ms))
        log.info("worker_registered", name=worker.name, role=message.role, model=worker.model.name)
        if message.role == "target":
            self.state.outbox.add(Connect(identity, message.endpoint))
            self.placement.bindings.welcome_back(message.incarnation)
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
        """Refuse drafters that came before any verifier and turn out to fit none."""
        targets = [w.model for w in self.state.workers.verifiers()]
        for worker in self.state.workers.drafters():
            if not any(fits(worker.model, target) for target in targets):
                self.state.outbox.send_front(worker.identity, Refused(reason=mismatch(worker.model, targets)))
                self.state.workers.remove(worker.identity)
