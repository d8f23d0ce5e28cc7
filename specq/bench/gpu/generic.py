"""The engine's logits beside transformers' own code on the same weights, in verify steps of a few sessions."""

from __future__ import annotations

from typing import Any

import torch

from specq.bench.engine_steps import GREEDY, Texts
from specq.bench.gpu.parts import Found, Task
from specq.bench.report import figure
from specq.engines.torch.forward import ForwardOutput, RowTap
from specq.engines.torch.generic import GenericForward
from specq.engines.torch.rows import PackedRows

SESSIONS, DRAFTS, CONTEXT, STEPS = 4, 8, 256, 5


class BothForwards:
    """Stands in for an engine's forward: computes each step twice over the same KV, and keeps both logits."""

    def __init__(self, forward: Any, generic: GenericForward) -> None:
        self.kv, self._forward, self._generic = forward.kv, forward, generic
        self.num_tap_layers = forward.num_tap_layers
        self.is_helped, self.jumps = forward.is_helped, forward.jumps
        self.logits: list[tuple[torch.Tensor, torch.Tensor]] = []  # both [num_rows, vocab]

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        output: ForwardOutput = self._forward(rows, tap)
        if len(output.logits):
            self.logits.append((output.logits.float().clone(), self._generic(rows).logits.float()))
        else:
            self._generic(rows)
        return output


def measure(task: Task) -> Found:
    """Return how far the logits lie apart, and how often both have the same best token."""
    target = task.pair.target
    engine: Any = task.pair.engine
    both = BothForwards(target.loaded.forward, GenericForward(target.network, target.loaded.forward.kv))
    engine._forward = both
    try:
        texts = Texts(engine, SESSIONS, CONTEXT, GREEDY)
        for _ in range(STEPS):
            texts.step(DRAFTS)
        texts.close()
    finally:
        engine._forward = target.loaded.forward
    return Found(
        {
            "largest difference": figure("logit", [_largest(ours - theirs) for ours, theirs in both.logits]),
            "largest logit": figure("logit", [_largest(theirs) for _, theirs in both.logits]),
            "same best token": figure("share", [_share_equal(*pair) for pair in both.logits]),
        }
    )


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _share_equal(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
