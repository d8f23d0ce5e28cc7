"""Rounds of a verifier whose sessions an EAGLE-3 head drafts for, around a target that takes the device a few milliseconds and says anything.

Waves of sessions with fresh prompts. `to drafts`: from the end of a step until the head's passes are launched, which is when the device has nothing to
do; `drafts`: from there on, until they hang on the trees, with whatever the host does meanwhile; `to step`: from there until the step is launched.
Of steps with prompts apart from others. `recorded`: how many passes were recorded while sessions waited; 0 is right. The head has random weights.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.gpu.heads import DEPTH, random_eagle
from bench.gpu.models import check_device
from bench.gpu.parts import Found, Task
from bench.report import Figure, figure, tell
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.source import EagleDrafter, usual_sizes
from specq.engines.torch.forward import tapped_rows
from specq.protocol import (
    NO_TAP,
    Close,
    Int32Array,
    ModelInfo,
    Open,
    SamplingParams,
    SessionRows,
    SessionStep,
    StepOutput,
    Tap,
)
from specq.verification import Judgements, StepBatch, starts_of
from specq.verifier import Budget, DraftBatch, StepCurve, Verifier

PROMPT, OUTPUT = 112, 96  # tokens
WAVES, MOST_S = 4, 8.0  # of one number of sessions; the first wave is not counted
STEP_CYCLES = 8_000_000  # of the device, about 5 ms
PEAK = 10.0  # logits of the head are so much larger than at random, so that some tokens are likely
DEEPEST = 4  # accepted nodes of a round: 0 to so many
CURVE = StepCurve([1, 64, 512], [0.005, 0.006, 0.010])

Times = dict[str, list[float]]  # milliseconds, by name


@dataclass(eq=False)
class AnyStep:
    """A step in flight; fulfils `Launched`. It is followed by none before it is collected."""

    target: AnyText
    batch: StepBatch
    hidden: SessionRows
    feeds: bool = False

    def collect(self) -> StepOutput:
        """See `Launched`."""
        self.target.settle()
        found = StepOutput(self.target.judge(self.batch.known().judged()), self.hidden)
        self.target.ended()
        return found

    def discard(self) -> None:
        """See `Launched`."""


class AnyText:
    """An engine without a model: it accepts some nodes of each tree and draws the other tokens; its hidden states are noise."""

    num_tap_layers, free_slots, max_chain = 8, 1_000_000, 0
    jumps: tuple[int, ...] = ()
    is_helped = takes_scratch = False
    overlaps = takes_unread = True

    def __init__(self, vocab: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        """`width`: of hidden states, of all layers that are asked for."""
        about = {"name": "any", "fingerprint": "any", "dtype": "none", "engine": "stub", "tokenizer_hash": "any"}
        sizes = {"vocab_size": vocab, "num_tokens": vocab, "max_length": 100_000, "kv_slots": 1_000_000}
        self.info = ModelInfo(**about, **sizes, eos_ids=())  # type: ignore[arg-type]
        self.launched = self.ended = _nothing
        self._noise = torch.randn(1024, width, device=device).to(dtype)
        self._rng = np.random.default_rng(0)

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """See `Engine`."""
        return 0

    def close(self, session_id: int) -> None:
        """See `Engine`."""

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """See `Engine`."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Any = None) -> AnyStep:
        """See `OverlappingEngine`."""
        self.launched()
        batch = StepBatch.of(steps)
        rows, starts = tapped_rows(batch, tap)
        if self._noise.is_cuda:
            torch.cuda._sleep(STEP_CYCLES)  # type: ignore[no-untyped-call]
        return AnyStep(self, batch, SessionRows(self._noise[: len(rows)].clone(), starts, tap.layers))

    def settle(self) -> None:
        """Wait for the device."""
        if self._noise.is_cuda:
            torch.cuda.synchronize()

    def judge(self, batch: StepBatch) -> Judgements:
        """Accept the first nodes of each tree, down to a depth that is drawn."""
        counts, nodes, token_ids = list[int](), list[int](), list[int]()
        firsts = starts_of(batch.num_nodes).tolist()
        wanted = self._rng.integers(0, DEEPEST + 1, len(batch)).tolist()
        own = self._rng.integers(1, self.info.vocab_size, len(batch)).tolist()
        for i, (first, count) in enumerate(zip(firsts, batch.num_nodes.tolist(), strict=True)):
            path = _first_path(batch.parents[first : first + count].tolist(), wanted[i])
            counts.append(len(path) + 1)
            nodes += [*path, -1]
            token_ids += [*batch.node_tokens[first : first + count][path].tolist(), own[i]]
        tokens, of_nodes = np.array(token_ids, np.int32), np.array(nodes, np.int32)
        return Judgements(batch.session_ids, np.array(counts, np.intp), tokens, of_nodes)

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """See `Engine`."""
        return [CURVE(size) for size in sizes]

    def shutdown(self) -> None:
        """See `Engine`."""


def _nothing() -> None:
    """What is told to nobody."""


def _first_path(parents: Sequence[int], depth: int) -> list[int]:
    """Return the first nodes of a tree, each below the one before, down to a depth."""
    path = list[int]()
    for node, parent in enumerate(parents):
        if len(path) < depth and parent == (path[-1] if path else -1):
            path.append(node)
    return path


class TimedEagle(EagleDrafter):
    """The source, with what it says of its moments."""

    launched: Callable[[], None] = staticmethod(_nothing)
    hung: Callable[[], None] = staticmethod(_nothing)

    def begin(self, sessions: Sequence[Any], budget: Budget, now: float) -> bool:
        """See `DraftSource`."""
        has_begun = super().begin(sessions, budget, now)
        self.launched()
        return has_begun

    def collect(self, sessions: Sequence[Any], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """See `DraftSource`."""
        found = super().collect(sessions, budget, clock)
        self.hung()
        return found


class Stages:
    """When a round came to its stages; a stage's time is since the one before it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def reach(self, name: str) -> Callable[[], None]:
        """Return what notes that a stage is reached."""

        def note() -> None:
            now = time.perf_counter()
            self.seconds[name], self._last = now - self._last, now

        return note


def measure(task: Task) -> Found:
    """Measure rounds by sessions."""
    check_device(task.pair.device)
    shape, device, dtype = task.pair.shapes["target"], torch.device(task.pair.device), task.pair.dtype
    head = random_eagle(shape, device, dtype)
    head.network.lm_head.weight.mul_(PEAK)
    eagle = Eagle(head)
    eagle.warm_up(max(task.sessions), (), usual_sizes(DEPTH))
    figures: dict[str, Figure] = {}
    for count in task.sessions:
        target = AnyText(shape.vocab, eagle_form.NUM_TAPS * shape.hidden, device, dtype)
        times, recorded = _rounds(eagle, target, count), eagle.num_recorded
        figures |= {f"S={count} {name}": figure("ms", values) for name, values in times.items()}
        figures[f"S={count} recorded"] = figure("passes", [eagle.num_recorded - recorded])
        tell(", ".join(f"S={count} {name} {np.median(values):.3f}" for name, values in times.items()))
    return Found(figures)


def _rounds(eagle: Eagle, target: AnyText, count: int) -> Times:
    """Time waves of so many sessions."""
    source, stages, times = TimedEagle(eagle, DEPTH), Stages(), defaultdict[str, list[float]](list)
    target.ended, source.launched = stages.reach("end"), stages.reach("to drafts")
    source.hung, target.launched = stages.reach("drafts"), stages.reach("to step")
    verifier = Verifier(target, CURVE, [source], incarnation=1, max_sessions=count, measures_drafts=False)
    rng, began = np.random.default_rng(count), time.perf_counter()
    for wave in range(WAVES):
        open_wave(verifier, rng, range(wave * count, (wave + 1) * count), PROMPT, OUTPUT)
        for has_prompts in steps_of(verifier):
            for name in ("to drafts", "drafts", "to step") if wave else ():
                if name in stages.seconds:
                    times[f"{'prompts' if has_prompts else 'steady'}, {name}"].append(1e3 * stages.seconds[name])
            stages.seconds.clear()
        if time.perf_counter() - began > MOST_S and wave:
            break
    return times


def open_wave(verifier: Verifier, rng: np.random.Generator, ids: Sequence[int], length: int, output_len: int) -> None:
    """Open sessions with random contexts of this length, for so many tokens."""
    for session_id in ids:
        context = rng.integers(1, verifier.engine.info.vocab_size, length).astype(np.int32)
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        said = {"prompt_len": length, "tokens_left": output_len}
        verifier.handle(Open(session_id=session_id, epoch=1, params=params, token_ids=context, **said), 0.0)  # type: ignore[arg-type]


def steps_of(verifier: Verifier, clock: Callable[[], float] = time.perf_counter) -> Iterator[bool]:
    """Serve what is open to its end; yield of each step whether it had prompts."""
    while verifier.has_work or verifier.sessions:
        has_prompts = verifier.sessions.has_prompts
        verifier.begin(clock(), clock)
        for verdict in verifier.step(clock):
            if getattr(verdict, "finish", ""):
                verifier.handle(Close(session_id=verdict.session_id, epoch=1), 0.0)  # type: ignore[attr-defined]
        yield has_prompts
