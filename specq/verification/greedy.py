"""`greedy`: always the target's top token, whatever was drafted and whatever the temperature; speculation off.

For debugging: what remains is plain decoding. Lossless at T = 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specq.types import Judgement
from specq.verification.draws import Draws
from specq.verification.packing import JudgedStep, take_rows
from specq.verification.sampling import choose_tokens


class Greedy:
    """Accepts nothing and emits the argmax after the committed context."""

    def judge(self, steps: Sequence[JudgedStep], logits: torch.Tensor, draws: Draws) -> list[Judgement]:
        """See `specq.verification.judge.Strategy`."""
        params = [replace(judged.step.params, temperature=0.0) for judged in steps]
        rows = take_rows(logits, [judged.first_row for judged in steps])
        tokens = choose_tokens(rows, params, [judged.step.base_len for judged in steps])
        return [Judgement(j.step.session_id, (), np.array([t], np.int32)) for j, t in zip(steps, tokens, strict=True)]
