"""`typical`: accept a node iff the target gives its token more than min(eps, delta * exp(-entropy)). Lossy.

Typical acceptance of Medusa (Cai et al. 2024, section 2.3.1): where the target is unsure, many tokens are typical and
the bar is low. eps 0.09 and delta 0.3 are `SamplingParams.typical_eps` and `typical_delta`. The entropy, in nats, is that
of the distribution after temperature and cuts; at T = 0 only the argmax is accepted, as in Medusa's code.

The bias: a drafted token above the bar is emitted for certain, however often the target itself would say it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from specq.protocol import NO_TREE, Float64Array, Int64Array, Judgement, SamplingParams
from specq.verification.interface import Draws, Strategy
from specq.verification.longest import judge_longest
from specq.verification.packing import JudgedStep, by_temperature, pack
from specq.verification.strategies.deterministic import Deterministic
from specq.verification.target_rows import TargetRows


class Typical(Strategy):
    """See the module."""

    parameters: ClassVar[Mapping[str, str]] = {
        "typical_eps": "Of typical: accept above the lesser of this and delta * exp(-entropy).",
        "typical_delta": "Of typical: see there.",
    }

    def is_lossless(self, params: SamplingParams) -> bool:
        """Never: bars may keep what is likeliest out, or let more in."""
        return False

    def says_own(self, params: SamplingParams) -> bool:
        """Always: bars are for drafts."""
        return True

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """See `Strategy.judge`."""
        # At T = 0 only the argmax has any probability, 1: what passes is the path of `deterministic`, if a bar lets it.
        return by_temperature(
            steps,
            lambda of: Deterministic().judge([_without_barred(judged) for judged in of], target, draws),
            lambda of: _judge_warm(of, target),
        )


def _without_barred(judged: JudgedStep) -> JudgedStep:
    """Leave the tree out where nothing is above the bar."""
    if min(judged.step.params.typical_eps, judged.step.params.typical_delta) < 1:
        return judged
    return judged._replace(step=replace(judged.step, tree=NO_TREE))


def _judge_warm(steps: Sequence[JudgedStep], target: TargetRows) -> list[Judgement]:
    packed = pack(steps)
    all_eps = np.repeat([judged.step.params.typical_eps for judged in steps], packed.sizes)
    all_delta = np.repeat([judged.step.params.typical_delta for judged in steps], packed.sizes)

    def bars(at: Int64Array | None, which: Int64Array, token_ids: Int64Array) -> tuple[Float64Array, Float64Array]:
        chosen = slice(None) if at is None else at
        distributions, probs = target.distributions(packed.rows[chosen])(which, token_ids[:, None])
        limits = np.minimum(all_eps[chosen], all_delta[chosen] * np.exp(-distributions.entropies()))
        return probs[:, 0], limits[which]

    return judge_longest(steps, packed, target, bars)
