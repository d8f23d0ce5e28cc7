"""What becomes of those whose key was taken away, or may do less than before: applied at each tick.

    workers   are lost: their sessions go to others, which counts against no job, and what they still send has no effect
    readers   are sent nothing more
    jobs      of a key that may not submit any more fail
    drafts    that were under way from a drafter that was trusted, and is no longer, may have been drawn from other
              distributions than it says. Where that matters, the session is opened anew, without them

Rule: a key is its name together with its public key. Another key under the same name is another key, but for jobs: they
belong to the name.
"""

from __future__ import annotations

import structlog

from specq.broker.jobs.intake import Intake
from specq.broker.state import BrokerState
from specq.broker.workers.placement import Placement
from specq.broker.workers.registry import Worker
from specq.protocol import Refused
from specq.verification import strategy

log = structlog.get_logger(__name__)


class Revocation:
    """Applies changes of the grants to what is under way."""

    def __init__(self, state: BrokerState, placement: Placement, intake: Intake) -> None:
        self.state, self.placement, self.intake = state, placement, intake

    def apply(self) -> None:
        """Lose the workers, drop the readers and fail the jobs of keys that are not allowed any more."""
        if not self.state.roles.have_changed():
            return
        for worker in self.state.workers.all():
            self._look_at(worker)
        jobs = list(self.state.jobs.active.values())
        for job in [*jobs, *self.state.jobs.finished.values()]:
            job.readers.retain(lambda reader: self.state.roles.stands(reader.shown, "client"))
        for job in jobs:
            if not self.state.roles.may_own(job.request.owner):
                self.intake.fail(job, "forbidden", "the key that submitted the job may not submit jobs any more")
        self.placement.settle()

    def _look_at(self, worker: Worker) -> None:
        """Lose a worker whose key is gone; open anew the sessions that a drafter drafts for that is not trusted any
        more."""
        stands = self.state.roles.stands(worker.shown, worker.hello.role)
        was_trusted, worker.is_trusted = worker.is_trusted, self.state.roles.trusts(worker.shown)
        drafted = self.placement.drafted_by(worker) if was_trusted and not worker.is_trusted else []
        if not stands:
            log.warning("worker_revoked", name=worker.name, role=worker.hello.role, key=worker.shown.name)
            self.state.counts["workers_revoked"] += 1
            reason = f"the key {worker.shown.name} may not be a {worker.hello.role} worker any more"
            refused = Refused(reason=reason, fatal=False)  # its next `Hello` is the test: the key may be back by then
            self.state.outbox.send_front(worker.identity, refused)
            self.placement.lose(worker)
        for job in drafted:
            if strategy(job.request.params.strategy).takes_distributions:  # which it was believed
                self.placement.open_anew(job)
