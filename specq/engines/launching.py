"""Steps of any engine in two halves: one that cannot overlap with the host answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from specq.engines.interface import Engine, Launched, OverlappingEngine
from specq.protocol import SessionStep, StepOutput, Tap


@dataclass(frozen=True, slots=True)
class Computed:
    """A step whose answer is here already; see `Launched`."""

    output: StepOutput
    feeds: bool = False

    def collect(self) -> StepOutput:
        return self.output

    def discard(self) -> None:
        raise NotImplementedError("what was computed at once is the engine's already")


def takes_unread(engine: Engine) -> bool:
    """Return whether a step may be launched with drafted tokens that the host has not read; see `OverlappingEngine`."""
    return engine.overlaps and cast("OverlappingEngine", engine).takes_unread


def launch(engine: Engine, steps: Sequence[SessionStep], tap: Tap, after: Launched | None = None) -> Launched:
    """Begin a step; see `OverlappingEngine.launch`."""
    if engine.overlaps:
        return cast("OverlappingEngine", engine).launch(steps, tap, after)
    return Computed(engine.step(steps, tap))
