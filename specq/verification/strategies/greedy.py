"""`greedy`: always the target's top token, whatever was drafted and whatever the temperature; speculation off.

For debugging: what remains is plain decoding. Lossless at T = 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence

from specq.protocol import Judgement, SamplingParams
from specq.verification.interface import Draws, Strategy
from specq.verification.packing import JudgedStep, make_rows
from specq.verification.target_rows import TargetRows


class Greedy(Strategy):
    """Accepts nothing and emits the argmax after the committed context."""

    uses_drafts = False

    def is_lossless(self, params: SamplingParams) -> bool:
        """At T = 0, where it is plain decoding."""
        return params.temperature == 0

    def judging_temperature(self, params: SamplingParams) -> float:
        """See `Strategy.judging_temperature`."""
        return 0.0

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> list[Judgement]:
        """See `Strategy.judge`."""
        params = [judged.step.params for judged in steps]
        rows = make_rows(params, [0] * len(steps), [judged.first_row for judged in steps])
        rows["temperature"] = 0
        tokens = target.own_tokens(rows)()
        return [Judgement(j.step.session_id, (), tokens[i : i + 1]) for i, j in enumerate(steps)]
