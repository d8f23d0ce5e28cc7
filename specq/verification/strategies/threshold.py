"""`threshold`: accept a node iff the target gives its token more than `SamplingParams.threshold` (default 0.1). Lossy.

The bias: a drafted token above the threshold is always emitted. The target itself may emit it rarely. The target's
probability is the one after temperature and cuts. At T = 0 that distribution is a point mass, and the strategy would be
plain greedy decoding. So at T = 0 it uses the softmax of the plain logits. A greedy job then accepts plausible drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from specq.protocol import Judgement, SamplingParams
from specq.verification.interface import Draws, Strategy
from specq.verification.longest import judge_longest
from specq.verification.packing import JudgedStep, Placed, pack
from specq.verification.target_rows import Bars, TargetRows


class Threshold(Strategy):
    """See the module."""

    parameters: ClassVar[Mapping[str, str]] = {
        "threshold": "Strategy threshold: accept tokens above this target probability."
    }

    def is_lossless(self, params: SamplingParams) -> bool:
        """Return False."""
        return False

    def judging_temperature(self, params: SamplingParams) -> float:
        """See `Strategy.judging_temperature`."""
        return params.temperature or 1.0

    def says_own(self, params: SamplingParams) -> bool:
        """Return True: bars apply to drafts only."""
        return True

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """See `Strategy.judge`."""
        packed = pack(steps)
        thresholds = np.array([params.threshold for params in Placed.of(steps).batch.params]).repeat(packed.sizes)
        warm, is_cold = packed.rows, packed.rows["temperature"] == 0
        if is_cold.any():
            warm = packed.rows.copy()
            warm["temperature"][is_cold] = 1
        return judge_longest(steps, packed, target, warm, Bars(thresholds, np.full_like(thresholds, np.inf)))
