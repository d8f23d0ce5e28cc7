"""Jobs that no verifier can go on with: none has their model, or the weights that their text began with.

They wait, since a verifier may come back, but not for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from specq.broker.jobs.job import BrokerJob, Requirements
from specq.broker.state import BrokerState
from specq.broker.workers.registry import Worker

SHOWN = 12  # digits of a fingerprint in texts


class Missing(NamedTuple):
    """A model, the weights of it ("": any), and whether owners are kept apart: what jobs wait for and no verifier
    has."""

    model: str
    weights: str
    apart: bool


class Unserved:
    """Looks at each tick for what is missing; `patience_s`: how long jobs wait for it, 0: for ever."""

    def __init__(self, state: BrokerState, patience_s: float) -> None:
        self.state, self.patience_s = state, patience_s
        self._since: dict[Missing, float] = {}

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

    def _is_served(self, missing: Missing) -> bool:
        verifiers = self.state.workers.verifiers(missing.model)
        return any(worker.serves(missing.weights, apart=missing.apart) for worker in verifiers)

    def _reason(self, missing: Missing) -> str:
        what = f"of the model {missing.model}"
        if missing.weights:
            what += f" with the weights {shown(missing.weights)}, which the text began with,"
        if missing.apart:
            what += " that knows cache_salt"
        served = _served(self.state.workers.verifiers())
        return f"no verifier {what} was there for {self.patience_s:g} s (weights_wait_seconds); {served}"


def _wanted(requirements: Requirements) -> Missing:
    return Missing(requirements.model, requirements.weights, requirements.apart)


def _served(verifiers: Iterable[Worker]) -> str:
    served = sorted({f"{worker.model.name} with {shown(worker.weights)}" for worker in verifiers})
    return f"served are {', '.join(served)}" if served else "none is served"


def shown(weights: str) -> str:
    """Return weights as texts name them."""
    fingerprint, _, dtype = weights.partition(" ")
    return f"{fingerprint[:SHOWN]} {dtype}".rstrip()
