"""`greedy`: always the target's top token, for any drafts and any temperature. Speculation is off.

For debugging: the result is plain decoding. Lossless at T = 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence

from specq.protocol import Judgement, SamplingParams
from specq.verification.interface import Draws, Strategy
from specq.verification.judgements import Judgements
from specq.verification.packing import JudgedStep, Placed
from specq.verification.target_rows import TargetRows


class Greedy(Strategy):
    """Accepts no drafts, and emits the argmax after the committed context."""

    uses_drafts = False

    def is_lossless(self, params: SamplingParams) -> bool:
        """Return True at T = 0, where it is plain decoding."""
        return params.temperature == 0

    def says_own(self, params: SamplingParams) -> bool:
        """Return True at T = 0, where a row's own token is the top one."""
        return params.temperature == 0

    def judging_temperature(self, params: SamplingParams) -> float:
        """See `Strategy.judging_temperature`."""
        return 0.0

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """See `Strategy.judge`."""
        placed = Placed.of(steps)
        rows = placed.batch.sampling.copy()
        rows["logit_row"], rows["temperature"] = placed.first_rows, 0
        return Judgements.of_tokens(placed.batch.session_ids, target.own_tokens(rows)())
