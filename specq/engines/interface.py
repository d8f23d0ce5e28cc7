"""The interface between a verifier and an engine.

Every engine runs a step in two halves: launch and collect. An engine without overlap computes the whole step in the
first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

from specq.config import OwnOptions
from specq.protocol import NO_TAP, Int32Array, ModelInfo, SessionStep, StepOutput, Tap


class Engine(Protocol):
    """What a verifier needs of a model.

    An engine keeps the KV of sessions in a fixed pool of `info.kv_slots` slots. Each token takes one slot. One thread
    drives the engine. `step` is the only expensive call.
    """

    info: ModelInfo
    max_chain: int  # most nodes of a session per step, which must then be a chain; 0: any tree
    num_tap_layers: int  # it returns hidden states of layers 0 .. num_tap_layers - 1, and FINAL; 0: of no layer
    takes_scratch: bool  # whether steps may have scratch rows
    overlaps: bool  # whether it is an `OverlappingEngine`, which runs steps while the host goes on
    # Whether threads on cores that other processes also use take part in steps. If this is True at first, the verifier
    # switches it between steps. Otherwise it stays False.
    is_helped: bool
    # Row counts, ascending. The kernels compute rows in tiles. So a step with one row more takes longer at once.
    # Between two jumps the time of a step is roughly linear. The verifier profiles on both sides of each jump.
    jumps: tuple[int, ...]

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session with this context, i32[n].

        Returns how many of its first tokens already have KV (a shared prefix), at most n - 1. Only sessions of one
        owner share KV. Otherwise response times would reveal the prompts of other owners. Raises EngineError if the
        session is open.
        """
        ...

    def close(self, session_id: int) -> None:
        """Free the session's KV. Unknown sessions are ignored. Shared prefixes stay cached until slots run short."""
        ...

    @property
    def free_slots(self) -> int:
        """Return the number of free KV slots for steps, including droppable cached prefixes.

        The verifier also reads it for each heartbeat. Raises EngineLostError if the engine is lost, even when no step
        is in flight.
        """
        ...

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Run one packed forward pass and judge it. Returns one Judgement for each step with `judged`, in order.

        A verifier passes a `specq.verification.StepBatch`, which also has the steps as arrays. It accepts `Judgements`
        as well as a list. Hidden states and the logits of scratch rows are returned on request. They change no
        judgement. Without a request they cost no time. On a device they stay there, and no part of the step waits for
        them.

        Each step's `start` equals the KV length of its session. Afterwards the KV holds start + m tokens and the
        accepted path. It holds neither the correction nor scratch rows. A session that cannot be judged gets a
        judgement with a `fault`. The caller must close it.

        Raises EngineError if there are fewer `free_slots` than rows, or if the engine does not support the request.
        After any error except EngineLostError the state is unchanged. The caller may then repeat the step with some of
        its sessions.
        """
        ...

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Return the expected seconds of a step for each number of rows.

        The verifier calls it at start-up, before its first session. `sizes` ascend. An engine measures steps of several
        short sessions where it has to prepare each size in any case. Else it returns what it was given to keep
        (`keep_times`), or an estimate. It may leave out the last sizes. The verifier corrects all times in service.
        """
        ...

    def shutdown(self) -> None:
        """Release the device and stop the processes that the engine started. No other call may follow."""
        ...


class Launched(Protocol):
    """A launched step.

    - feeds: whether the device knows the tokens of this step before the host collects them. Then `StepBatch.fed_by` of
      the next step may name its sessions. This requires a step without drafts, and judging without data from the host.
    """

    @property
    def feeds(self) -> bool: ...

    def collect(self) -> StepOutput:
        """Wait for the step and return the result of `Engine.step`.

        Steps are collected in launch order. If this raises, the step has changed no state. The caller must then discard
        the steps that were launched after it, newest first.
        """
        ...

    def discard(self) -> None:
        """Forget the step, as if it had never been launched. Allowed for the newest step only."""
        ...


class OverlappingEngine(Engine, Protocol):
    """An engine that can launch the next step before the last one is collected.

    At most two steps are in flight. An engine that launches steps in its own processes may have three.

    A session may be closed while one of its steps is in flight. Its id may even be opened again. The output of that
    step for the session is then discarded.

    An engine may judge late (`specq.engines.judges_late`): if a step with masks takes tokens of the step before, masks
    follow from these tokens. Then its `Launched` has a method `judge`. The caller calls it once the step before has
    been committed. Until then no step may be launched behind it.

    An engine may also have a method `tidy`. It does the work that collecting a step has deferred
    (`specq.engines.tidy`). Any engine may name the chains that it computes faster (`specq.engines.even_chains`). It may
    also declare that it launches steps in other processes (`specq.engines.is_apart`).
    """

    # whether a step may have draft tokens that only the device knows at launch (`StepBatch.drafted`)
    takes_unread: bool

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> Launched:
        """Begin a step: `step` is `launch(...).collect()`.

        `after` is the newest step in flight, if any. Each step's `start` equals the KV length after that step is
        collected. Raises like `step`, with no change.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The table entry of an engine, available before the engine is loaded.

    The module of a spec must import neither torch nor a model.

    - make: makes the engine from a model's directory or hub name. `specq.processes.target` lists its keyword arguments.
      The heavy imports belong in this function.
    - options: the keys of [target.NAME]. `make` also takes them as keyword arguments.
    - renumbers_devices: whether the process sees only its own GPUs, renumbered from cuda:0.
    - prefill_rows: default for the most rows of a step that computes prompts; 0: as for other steps.
    - package: the package that `make` needs; "": no extra package.
    - colocates: whether it gets a draft model in the same process by default.
    - check: raises ConfigError if what runs a model is not installed. Arguments: the model's path, device and dtype.
    - takes_gguf: whether it loads GGUF files.
    - takes_heads: whether it returns the hidden states that heads draft from.
    - runs_heads: whether `make` also takes `heads` (a directory, or MTP) and `levels`, so that the engine itself drafts
      with them.
    - takes_scratch: whether its steps take scratch rows, which lookahead decoding needs.
    """

    make: Callable[..., Engine]
    options: type[OwnOptions] = OwnOptions
    renumbers_devices: bool = False
    prefill_rows: int = 0
    package: str = ""
    check: Callable[[str, str, str], object] = lambda *_: None
    colocates: bool = False
    takes_gguf: bool = True
    takes_heads: bool = True
    runs_heads: bool = False
    takes_scratch: bool = True


@dataclass(frozen=True, slots=True)
class Computed:
    """A step whose result is already available; see `Launched`."""

    output: StepOutput
    feeds: bool = False

    def collect(self) -> StepOutput:
        return self.output

    def discard(self) -> None:
        raise NotImplementedError("what was computed at once is the engine's already")


def takes_unread(engine: Engine) -> bool:
    """Return whether a step may have draft tokens unread by the host; see `OverlappingEngine`."""
    return engine.overlaps and cast("OverlappingEngine", engine).takes_unread


def own_levels(engine: Engine) -> int:
    """Return how many tokens the engine's own drafter drafts behind a step (`Tap.drafts`). 0: it has none."""
    return int(getattr(engine, "own_levels", 0))


def judges_late(engine: Engine) -> bool:
    """Return whether sessions with masks may take their token from the step in flight; see `OverlappingEngine`."""
    return not engine.overlaps or bool(getattr(engine, "judges_late", False))


def is_apart(engine: Engine) -> bool:
    """Return whether the engine launches its steps in processes of its own.

    The verifier then sends the next step as early as possible.
    """
    return engine.overlaps and bool(getattr(engine, "is_apart", False))


def drafts_on(engine: Engine) -> str:
    """Return the device on which a colocated drafter must run, "" if that is the configured one."""
    return str(getattr(engine, "drafts_on", ""))


def even_chains(engine: Engine) -> Mapping[int, int]:
    """Return {number of nodes: most sessions} for steps that are faster if all chains have this length.

    For engines that take chains only. The engine pads shorter chains to this length. Empty: chain lengths do not affect
    the time.
    """
    found: Mapping[int, int] = getattr(engine, "even_chains", {})
    return found


def scores_rows(engine: Engine) -> bool:
    """Return whether the engine returns log-probabilities of prompt tokens (`SessionStep.scored`)."""
    return bool(getattr(engine, "scores_rows", False))


def takes_masks(engine: Engine) -> bool:
    """Return whether the engine's judge applies the masks of grammars (`StepBatch.masks`). Others serve no grammars."""
    return bool(getattr(engine, "takes_masks", False))


def tidy(engine: Engine) -> None:
    """Let an engine do the work that it deferred when it collected a step.

    Without this call the engine does the work at the next call. The device would then wait for it. The verifier calls
    it while the device has other work.
    """
    if callable(tidies := getattr(engine, "tidy", None)):
        tidies()


def keep_times(engine: Engine, times: Mapping[int, float]) -> None:
    """Let an engine keep the seconds of steps that were learned in service, for `Engine.step_times` of a later process.

    times: by number of rows, ascending.
    """
    if callable(keeps := getattr(engine, "keep_times", None)):
        keeps(times)


@contextmanager
def helped(engine: Engine, *, is_helped: bool) -> Iterator[None]:
    """Let threads on other cores take part in steps meanwhile, or not."""
    before, engine.is_helped = engine.is_helped, is_helped
    try:
        yield
    finally:
        engine.is_helped = before


def launch(engine: Engine, steps: Sequence[SessionStep], tap: Tap, after: Launched | None = None) -> Launched:
    """Begin a step; see `OverlappingEngine.launch`."""
    if engine.overlaps:
        return cast("OverlappingEngine", engine).launch(steps, tap, after)
    return Computed(engine.step(steps, tap))
