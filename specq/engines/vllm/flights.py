"""Launched steps, and the sessions that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specq.engines.vllm.patches.scheduler import Holding
from specq.protocol import IntpArray, StepOutput
from specq.verification import StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The sessions of a step.

    They have their places and openings (`SessionTable`), their holdings, and the ids of their requests.
    """

    places: IntpArray
    openings: IntpArray
    holdings: list[Holding]
    request_ids: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class SessionFlight:
    """A launched step; fulfils `specq.engines.Launched`.

    - members: its sessions.
    - land, drop: the functions that collect and discard it.
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
