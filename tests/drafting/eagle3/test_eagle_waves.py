"""Waves of sessions drafted by an EAGLE-3 head whose passes are recorded: all that they need is recorded beforehand."""

from __future__ import annotations

from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.source import EagleSource, usual_sizes
from specq.models import Shape
from specq.protocol import EAGLE
from specq.verifier import StepCurve, Verifier
from tests.replaying import StandIn
from tests.verifier.any_text import AnyText, open_wave, random_eagle, steps_of

SHAPE = Shape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=16, vocab=300)
MOST = 64


class Still(StandIn):
    """Computes each batch once and replays the first results. All nodes are certain."""

    def run(self, key: Any, work: Any) -> torch.Tensor:
        found = super().run(key, work)
        if key[0] == "trees":
            found[2:] = 0  # bits of log-probabilities
        return found

    def _record(self, work: Any) -> Any:
        return SimpleNamespace(replay=lambda: None)


@pytest.mark.parametrize("most", [MOST, MOST // 2])
def test_no_graph_is_captured_while_sessions_wait(most: int) -> None:
    """All sessions at once, twice, with prompts of 111 tokens, which end in the middle of steps, and some with contexts
    of up to 512; they end one after the other, down to the last one."""
    torch.manual_seed(1)
    replays = Still()
    eagle = Eagle(random_eagle(SHAPE, torch.device("cpu"), torch.float32), replays)
    eagle.warm_up(most, (), usual_sizes(8))
    recorded = replays.num_recorded
    target = AnyText(SHAPE.vocab, 3 * SHAPE.hidden, torch.device("cpu"), torch.float32)
    curve, source = StepCurve([1, 64], [0.005, 0.006]), EagleSource(eagle, 8)
    verifier = Verifier(target, curve, [source], incarnation=1, max_sessions=most, measures_drafts=False)
    ticks = count()

    def clock() -> float:
        return 0.001 * next(ticks)

    rng, num_sessions = np.random.default_rng(1), Counter[int]()
    with structlog.testing.capture_logs() as logs:
        for wave in range(2):
            for i in range(most):
                open_wave(verifier, rng, [wave * most + i], 400 if i % 16 == 3 else 111, 20 + (i + 50 * wave) % 77)
            for _ in steps_of(verifier, clock):
                num_sessions[len(eagle.texts)] += 1
    assert max(num_sessions) == most
    assert min(num_sessions) == 0
    assert [entry for entry in logs if "recorded" in entry["event"]] == []
    assert replays.num_recorded == recorded
    assert source in verifier.sources.sources
    assert verifier.heartbeat().metrics["judged"][EAGLE][1] > 30 * most
