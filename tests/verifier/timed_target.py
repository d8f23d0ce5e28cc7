"""A device beside the host that only takes time, and a target model on it, by a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specq.engines import Launched
from specq.protocol import (
    NO_TAP,
    Int32Array,
    Judgement,
    ModelInfo,
    SessionStep,
    StepOutput,
    Tap,
)
from specq.simulate.scenarios import HardwareCurve, Points
from specq.simulate.stubs import StubText
from specq.verification import StepBatch

TEXT = StubText()
INFO = ModelInfo(
    name="timed", fingerprint="timed", dtype="none", engine="stub", vocab_size=TEXT.vocab_size,
    num_tokens=TEXT.vocab_size,
    eos_ids=(0,), max_length=1_000_000, tokenizer_hash="timed", kv_slots=10_000_000,
)  # fmt: skip


@dataclass(slots=True)
class Machine:
    """A host and a device; `now`: the host's clock, seconds; `is_free_at`: when the device has done all it was
    given."""

    now: float = 0.0
    is_free_at: float = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """Let the host compute."""
        self.now += seconds

    def launch(self, seconds: float) -> float:
        """Give the device work; return when it will be done."""
        self.is_free_at = max(self.is_free_at, self.now) + seconds
        return self.is_free_at

    def wait(self, until: float) -> None:
        """Let the host wait for the device."""
        self.now = max(self.now, until)


@dataclass(eq=False)
class TimedStep:
    """A step in flight; fulfils `specq.engines.Launched`."""

    target: TimedTarget
    batch: StepBatch
    after: TimedStep | None
    done_at: float
    tokens: Int32Array | None = None  # of the judged sessions, once collected

    @property
    def feeds(self) -> bool:
        """See `Launched`."""
        return not len(self.batch.parents)

    def collect(self) -> StepOutput:
        """See `Launched`."""
        return self.target.collect(self)

    def discard(self) -> None:
        """See `Launched`."""
        raise AssertionError("no step fails here")


class TimedTarget:
    """An engine whose steps take their curve's time on the device, with prompts `mixed_s` more and `attended_s` for
    each token that a row of them attends to, and `launch_s` and `collect_s` of the host, for each session
    `session_s`."""

    max_chain = num_tap_layers = 0
    takes_unread = False
    is_helped = False
    jumps: tuple[int, ...] = ()
    takes_scratch = True
    info = INFO
    free_slots = 1_000_000

    def __init__(
        self,
        machine: Machine,
        step_ms: Points,
        *,
        overlaps: bool,
        launch_s: float,
        collect_s: float,
        session_s: float = 0.0,
        mixed_s: float = 0.0,
        attended_s: float = 0.0,
    ) -> None:
        self.machine, self.overlaps, self._curve = machine, overlaps, HardwareCurve(step_ms)
        self._mixed_s, self._attended_s = mixed_s, attended_s
        self._launch_s, self._collect_s, self._session_s = launch_s, collect_s, session_s

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """See `Engine`."""
        return 0

    def close(self, session_id: int) -> None:
        """See `Engine`."""

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """See `Engine`."""
        return [self._curve(size) for size in sizes]

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """See `Engine`."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> TimedStep:
        """See `OverlappingEngine`."""
        batch = StepBatch.of(steps)
        self.machine.work(self._launch_s + self._session_s * len(batch))
        assert after is None or isinstance(after, TimedStep)
        seconds = self._curve(sum(step.num_rows for step in batch))
        prompts = [step for step in batch if not step.judged or len(step.token_ids) > 1]
        attended = sum((step.base_len - step.start) * (step.base_len + step.start + 1) // 2 for step in prompts)
        seconds += self._mixed_s * bool(prompts) + self._attended_s * attended
        return TimedStep(self, batch, after, self.machine.launch(seconds))

    def collect(self, late: TimedStep) -> StepOutput:
        """Wait for a step and judge it."""
        self.machine.wait(late.done_at)
        self.machine.work(self._collect_s + self._session_s * len(late.batch))
        batch = late.batch
        if batch.fed_by is not None:
            assert late.after is not None
            assert late.after.tokens is not None
            batch = batch.fed(late.after.tokens[batch.fed_by])
        late.after = None
        judgements = [_judge(step) for step in batch if step.judged]
        late.tokens = np.array([one.token_ids[0] for one in judgements], np.int32)
        return StepOutput(judgements)


def _judge(step: SessionStep) -> Judgement:
    position, at, path = step.base_len, -1, list[int]()
    tokens = [TEXT.token(step.session_id, position, int(step.token_ids[-1]))]
    for i, (token, parent) in enumerate(zip(step.tree.token_ids.tolist(), step.tree.parents.tolist(), strict=True)):
        if parent == at and token == tokens[-1]:
            position, at = position + 1, i
            path.append(i)
            tokens.append(TEXT.token(step.session_id, position, token))
    return Judgement(step.session_id, tuple(path), np.array(tokens, np.int32))
