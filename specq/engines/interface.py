"""What a verifier needs of an engine.

Steps of any engine in two halves: one that cannot overlap with the host answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from specq.config import OwnOptions
from specq.protocol import NO_TAP, Int32Array, ModelInfo, SessionStep, StepOutput, Tap


class Engine(Protocol):
    """What a verifier needs of a model.

    An engine keeps the KV of each session in a fixed pool of `info.kv_slots` slots, one a token; it is driven by one
    thread. `step` is the only expensive call.
    """

    info: ModelInfo
    max_chain: int  # a session's tree in one step must be a chain of so many nodes at most; 0: any tree
    num_tap_layers: int  # hidden states may be asked for of layers 0 .. num_tap_layers - 1, and FINAL; 0: of none
    takes_scratch: bool  # whether steps may have scratch rows
    overlaps: bool  # whether it is an `OverlappingEngine`, and runs steps while the host goes on
    # Whether threads on cores that other processes use as well take part in steps. Where this is so at first, the
    # verifier switches it between steps; elsewhere it stays False.
    is_helped: bool
    # Numbers of rows, ascending, after which a step takes longer at once, since its rows are computed so many at a
    # time. Between them a step's time is about a line. The verifier profiles on both sides of each.
    jumps: tuple[int, ...]

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session with this context i32[n]; return how many of its first tokens have KV already (shared
        prefix), at most n - 1. KV is shared among sessions of one owner only: else what another one asked for could be
        learned by how soon tokens come. Raises EngineError if the session is open."""
        ...

    def close(self, session_id: int) -> None:
        """Free the session's KV; unknown sessions are ignored. Shared prefixes stay cached until slots run short."""
        ...

    @property
    def free_slots(self) -> int:
        """KV slots that a step may still take, cached prefixes that can be dropped included. Asked for each heartbeat,
        too: where the engine is lost though nobody asks it for a step, EngineLostError is raised."""
        ...

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Run one packed forward pass and judge it; one Judgement for each step with `judged`, in order. A verifier
        gives a `specq.verification.StepBatch`, which has the steps as arrays too, and takes `Judgements` as well as a
        list. Hidden states and the logits of scratch rows are returned where they are asked for, which changes no
        judgement and costs nothing where they are not; on a device they stay there, and nothing waits for them.

        Each step's `start` equals the session's KV length. Afterwards the KV holds start + m tokens plus the accepted
        path (not the correction), and nothing of scratch rows. A session that cannot be judged has a judgement with a
        `fault`, and is to be closed. Raises EngineError, with nothing changed, if `free_slots` is less than the rows,
        or if the engine does not give what is asked for. After any other error but EngineLostError nothing has changed
        either: the step may be repeated with some of its sessions.
        """
        ...

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Measure seconds per step for so many rows each, of several short sessions; used to profile at start-up.

        `sizes` ascend; an engine may leave out the last of them, of which the verifier then learns in service."""
        ...

    def shutdown(self) -> None:
        """Let go of the device, and of processes that were started; nothing else may be asked afterwards."""
        ...


class Launched(Protocol):
    """A step that was launched.

    feeds   whether the tokens that it says are known to the device before the host has collected them, so that
            `StepBatch.fed_by` of the next step may name its sessions: where nothing was drafted, and judging needs
            nothing of the host
    """

    @property
    def feeds(self) -> bool: ...

    def collect(self) -> StepOutput:
        """Wait for the step and return what `Engine.step` does. Steps are collected in the order in which they were
        launched. If this raises, the step has changed nothing, and those that were launched after it must be discarded,
        the newest first."""
        ...

    def discard(self) -> None:
        """Forget the step, as if it had never been launched: the newest one only."""
        ...


class OverlappingEngine(Engine, Protocol):
    """An engine whose next step may be launched before the last one is collected; at most two are in flight, or three
    where processes of their own launch them.

    A session may be closed, and one of its id opened again, while a step of it is in flight: what that step says of it
    is nobody's then.

    It may have a method `tidy`, too: what it has put off when a step was collected (`specq.engines.tidy`). Any engine
    may say for which chains it is quicker (`specq.engines.even_chains`), and whether it launches steps in other
    processes (`specq.engines.is_apart`).
    """

    # whether steps may have drafted tokens that only the device knows when they are launched (`StepBatch.drafted`)
    takes_unread: bool

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> Launched:
        """Begin a step: `step` is `launch(...).collect()`. `after`: the newest step in flight, if there is one. Each
        step's `start` equals the KV length as it will be when that is collected. Raises as `step` does, with nothing
        changed."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a table has of an engine before it is loaded. So the module of a spec imports neither torch nor a model.

    make                makes the engine, given a model's directory or hub name and the keyword arguments that
                        `specq.processes.target` names; here the heavy imports are
    options             the keys of [target.NAME], which `make` takes as keyword arguments, too
    renumbers_devices   whether its process sees only its own GPUs, counted anew from cuda:0
    prefill_rows        most rows of a step that computes prompts, if more than of others, unless the configuration says
                        it
    package             what must be installed for `make` to work; "": nothing more
    takes_gguf          whether it loads GGUF files
    takes_heads         whether it returns the hidden states that heads draft from
    takes_scratch       whether its steps take scratch rows, which lookahead decoding needs
    """

    make: Callable[..., Engine]
    options: type[OwnOptions] = OwnOptions
    renumbers_devices: bool = False
    prefill_rows: int = 0
    package: str = ""
    takes_gguf: bool = True
    takes_heads: bool = True
    takes_scratch: bool = True


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
