"""Launched steps, and the sessions that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specq.engines.vllm.patches.scheduler import Holding
from specq.protocol import EngineLostError, IntpArray, StepOutput
from specq.verification import StepBatch, TokenMasks


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The sessions of a step.

    They have their places and openings (`SessionTable`), their holdings, and the ids of their requests.
    """

    places: IntpArray
    openings: IntpArray
    holdings: list[Holding]
    request_ids: list[str]


@dataclass(slots=True, eq=False)
class SessionFlight:
    """A launched step; fulfils `specq.engines.Launched`.

    - members: its sessions.
    - gives_tokens: whether the next step may begin with its tokens, once it is being judged.
    - land, drop: the functions that collect and discard it.
    - judge_late: lets the workers judge it, if it waits for its masks.
    """

    batch: StepBatch
    members: Members
    gives_tokens: bool
    land: Callable[[SessionFlight], StepOutput]
    drop: Callable[[SessionFlight], None]
    judge_late: Callable[[TokenMasks, StepBatch], None] | None

    @property
    def feeds(self) -> bool:
        """See `specq.engines.Launched`."""
        return self.gives_tokens and self.judge_late is None

    def judge(self) -> None:
        """See `specq.engines.OverlappingEngine`."""
        if self.judge_late is not None and self.batch.masks is not None:
            self.judge_late(self.batch.masks, self.batch.judged())
            self.judge_late = None

    def collect(self) -> StepOutput:
        """See `specq.engines.Launched`. Nothing was launched behind a step that waits for its masks."""
        try:
            self.judge()
        except EngineLostError:
            raise
        except Exception:
            self.discard()
            raise
        return self.land(self)

    def discard(self) -> None:
        """See `specq.engines.Launched`."""
        self.drop(self)
