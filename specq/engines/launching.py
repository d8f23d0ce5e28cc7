"""Steps of any engine in two halves: one that cannot overlap with the host answers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def is_apart(engine: Engine) -> bool:
    """Return whether processes of their own launch an engine's steps, while the host goes on: so the sooner they are
    told of the next step, the better."""
    return engine.overlaps and bool(getattr(engine, "is_apart", False))


def even_chains(engine: Engine) -> Mapping[int, int]:
    """Return, of an engine that takes chains, numbers of nodes -> the most sessions of a step that may all have chains
    of so many, if it computes such a step quicker than one whose chains differ; shorter chains it makes as long. Empty:
    lengths are of no matter."""
    found: Mapping[int, int] = getattr(engine, "even_chains", {})
    return found


def tidy(engine: Engine) -> None:
    """Let an engine do now what it has put off when a step was collected, if it puts anything off: it does so until the
    next call, where the device would wait for it. So it is told when the device has other work."""
    if callable(tidies := getattr(engine, "tidy", None)):
        tidies()


def launch(engine: Engine, steps: Sequence[SessionStep], tap: Tap, after: Launched | None = None) -> Launched:
    """Begin a step; see `OverlappingEngine.launch`."""
    if engine.overlaps:
        return cast("OverlappingEngine", engine).launch(steps, tap, after)
    return Computed(engine.step(steps, tap))
