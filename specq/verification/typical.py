"""`typical`: accept a node iff the target gives its token more than min(eps, delta * exp(-entropy)). Lossy.

Typical acceptance of Medusa (Cai et al. 2024, section 2.3.1): where the target is unsure, many tokens are typical and
the bar is low. eps 0.09 and delta 0.3 are `SamplingParams.typical_eps` and `typical_delta`. The entropy, in nats, is that
of the law after temperature and cuts; at T = 0 only the argmax is accepted, as in Medusa's code.

The bias: a drafted token above the bar is emitted for certain, however often the target itself would say it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specq.types import Judgement
from specq.verification.draws import Draws
from specq.verification.longest import judge_longest
from specq.verification.packing import JudgedStep, pack
from specq.verification.sampling import target_probs


class Typical:
    """See the module."""

    def judge(self, steps: Sequence[JudgedStep], logits: torch.Tensor, draws: Draws) -> list[Judgement]:
        """See `specq.verification.judge.Strategy`."""
        rows = pack(steps, logits)
        probs = target_probs(rows.logits, rows.params)
        entropy = torch.special.entr(probs).sum(-1)
        eps, delta = (
            torch.tensor(values, dtype=torch.float64, device=logits.device)
            for values in ([p.typical_eps for p in rows.params], [p.typical_delta for p in rows.params])
        )
        return judge_longest(steps, rows, probs, torch.minimum(eps, delta * (-entropy).exp()))
