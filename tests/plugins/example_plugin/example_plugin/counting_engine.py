"""`counting`: an engine without a model's weights. The next token is the last one plus `stride`; it has a checkpoint's
tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specq.config import OwnOptions, option
from specq.engines import EngineSpec, check_asked, describe, resolve_directory
from specq.protocol import NO_TAP, EngineError, Int32Array, Judgement, SessionStep, StepOutput, Tap, Tree

DEFAULT_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class CountingOptions(OwnOptions):
    """The keys of [target.counting], and of --engine-option."""

    LABEL = "counting"

    stride: int = option(1, "what is added to a token", low=1, high=100)


class CountingEngine:
    """Fulfils `specq.engines.Engine`. Its target distribution is a point mass, so all lossless strategies judge
    alike."""

    max_chain = 0
    num_tap_layers = 0
    is_helped = False
    overlaps = False
    takes_scratch = False
    jumps: tuple[int, ...] = ()

    def __init__(self, model: str, *, kv_slots: int = 0, name: str = "", stride: int = 1, **_shared: Any) -> None:
        self._stride = stride
        directory = resolve_directory(model, "the counting engine")
        self.info = describe(
            directory,
            engine="counting",
            name=name,
            dtype="none",
            vocab_size=json.loads((directory / "config.json").read_text("utf-8"))["vocab_size"],
            max_length=2000,
            kv_slots=kv_slots or DEFAULT_SLOTS,
        )
        self._contexts: dict[int, list[int]] = {}

    @property
    def free_slots(self) -> int:
        return self.info.kv_slots - sum(map(len, self._contexts.values()))

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        if session_id in self._contexts:
            raise EngineError(f"session {session_id} is already open")
        self._contexts[session_id] = []
        return 0

    def close(self, session_id: int) -> None:
        self._contexts.pop(session_id, None)

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        check_asked(self, steps, tap)
        if sum(step.num_rows for step in steps) > self.free_slots:
            raise EngineError("KV slots run short")
        for step in steps:
            self._contexts[step.session_id] += step.token_ids.tolist()
        return StepOutput([self._judge(step) for step in steps if step.judged])

    def _judge(self, step: SessionStep) -> Judgement:
        context = self._contexts[step.session_id]
        path = _matching(step.tree, self._next(context[-1]), self._next)
        accepted = step.tree.token_ids[path].tolist()
        context += accepted
        return Judgement(step.session_id, tuple(path), np.array([*accepted, self._next(context[-1])], np.int32))

    def _next(self, token: int) -> int:
        return (token + self._stride) % self.info.num_tokens

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        return [0.001 + 0.00001 * size for size in sizes]

    def shutdown(self) -> None:
        """Release no resources: the engine has none."""


def _matching(tree: Tree, token: int, following: Any) -> list[int]:
    """Return the path of nodes that begins with a token, each followed by what follows it."""
    path: list[int] = []
    while True:
        is_next = (tree.parents == (path[-1] if path else -1)) & (tree.token_ids == token)
        if not is_next.any():
            return path
        path.append(int(np.argmax(is_next)))
        token = following(token)


COUNTING = EngineSpec(CountingEngine, CountingOptions)
