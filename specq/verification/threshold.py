"""`threshold`: accept a node iff the target gives its token more than `SamplingParams.threshold` (default 0.1). Lossy.

The bias: a drafted token above the threshold is emitted for certain, however often the target itself would say it.

The target's probability is that after temperature and cuts; at T = 0, where that law is a point mass and the strategy
would be plain greedy decoding, it is the softmax of the plain logits, so that a greedy job lets plausible drafts through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specq.types import Judgement
from specq.verification.draws import Draws
from specq.verification.longest import judge_longest
from specq.verification.packing import JudgedStep, pack
from specq.verification.sampling import target_probs


class Threshold:
    """See the module."""

    def judge(self, steps: Sequence[JudgedStep], logits: torch.Tensor, draws: Draws) -> list[Judgement]:
        """See `specq.verification.judge.Strategy`."""
        rows = pack(steps, logits)
        params = [p if p.temperature > 0 else replace(p, temperature=1.0) for p in rows.params]
        bars = torch.tensor([p.threshold for p in params], dtype=torch.float64, device=logits.device)
        return judge_longest(steps, rows, target_probs(rows.logits, params), bars)
