"""Steps of sessions that were launched, and whose steps they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specq.engines.vllm.patches.scheduler import Holding
from specq.protocol import IntpArray, StepOutput
from specq.verification import StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The sessions of a step: their places and openings (`SessionTable`), what is held for them, and the ids of their
    requests."""

    places: IntpArray
    openings: IntpArray
    holdings: list[Holding]
    request_ids: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class SessionFlight:
    """A step that was launched; fulfils `specq.engines.Launched`.

    members      its sessions
    land, drop   what collects it, and what discards it
    """

    batch: StepBatch
    members: Members
    feeds: bool
    land: Callable[[SessionFlight], StepOutput]
    drop: Callable[[SessionFlight], None]

    def collect(self) -> StepOutput:
        """See `specq.engines.Launched`."""
        return self.land(self)

    def discard(self) -> None:
        """See `specq.engines.Launched`."""
        self.drop(self)
