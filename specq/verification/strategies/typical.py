"""`typical`: accept a node iff the target gives its token more than min(eps, delta * exp(-entropy)). Lossy.

This is typical acceptance of Medusa (Cai et al. 2024, section 2.3.1). If the target is unsure, many tokens are typical
and the bar is low. eps 0.09 and delta 0.3 are `SamplingParams.typical_eps` and `typical_delta`. The entropy, in nats,
is that of the distribution after temperature and cuts. At T = 0 only the argmax is accepted, as in Medusa's code.

The bias: a drafted token above the bar is always emitted. The target itself may emit it rarely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from specq.protocol import NO_TREE, Float64Array, Judgement, SamplingParams
from specq.verification.interface import Draws, Strategy
from specq.verification.judgements import Judgements
from specq.verification.longest import judge_longest
from specq.verification.packing import JudgedStep, Placed, by_temperature, pack
from specq.verification.strategies.deterministic import Deterministic
from specq.verification.target_rows import Bars, TargetRows


class Typical(Strategy):
    """See the module."""

    parameters: ClassVar[Mapping[str, str]] = {
        "typical_eps": "Strategy typical: accept above min(this, delta * exp(-entropy)).",
        "typical_delta": "Strategy typical: factor delta of the entropy bound (see --typical-eps).",
    }

    def is_lossless(self, params: SamplingParams) -> bool:
        """Return False: bars may exclude the likeliest token, or accept others."""
        return False

    def says_own(self, params: SamplingParams) -> bool:
        """Return True: bars apply to drafts only."""
        return True

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """See `Strategy.judge`."""
        # At T = 0 only the argmax has a probability, which is 1. So the path of `deterministic` passes, unless a bar
        # excludes it.
        return by_temperature(
            steps,
            lambda of: Deterministic().judge(_without_barred(of), target, draws),
            lambda of: _judge_warm(of, target),
        )


def _without_barred(steps: Sequence[JudgedStep]) -> Sequence[JudgedStep]:
    """Remove the trees of steps whose bar excludes every node."""
    is_barred = np.minimum(*_bar_params(steps)) >= 1
    if not is_barred.any():
        return steps
    return [
        judged._replace(step=replace(judged.step, tree=NO_TREE)) if barred else judged
        for judged, barred in zip(steps, is_barred.tolist(), strict=True)
    ]


def _bar_params(steps: Sequence[JudgedStep]) -> tuple[Float64Array, Float64Array]:
    """Return eps and delta of each step, f64[steps]."""
    params = Placed.of(steps).batch.params
    return np.array([own.typical_eps for own in params]), np.array([own.typical_delta for own in params])


def _judge_warm(steps: Sequence[JudgedStep], target: TargetRows) -> Judgements:
    packed = pack(steps)
    bars = Bars(*(of_steps.repeat(packed.sizes) for of_steps in _bar_params(steps)))
    return judge_longest(steps, packed, target, packed.rows, bars)
