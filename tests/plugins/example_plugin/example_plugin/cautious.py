"""`cautious`: accept as `deterministic` does, but one drafted token a round at most. So the text is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specq.protocol import Judgement, SamplingParams
from specq.verification import Strategy, strategy
from specq.verification.interface import Draws
from specq.verification.packing import JudgedStep
from specq.verification.target_rows import TargetRows

MOST = 1


class Cautious(Strategy):
    """See the module."""

    def is_lossless(self, params: SamplingParams) -> bool:
        """Always: what it accepts, `deterministic` accepts."""
        return True

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> list[Judgement]:
        """Cut the judgements of `deterministic` short."""
        judgements = strategy("deterministic").judge(steps, target, draws)
        return [replace(j, path=j.path[:MOST], token_ids=j.token_ids[: MOST + 1]) for j in judgements]
