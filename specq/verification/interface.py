"""The interface of a verification strategy: a rule that judges drafts, and its traits for the rest of specq.

The broker, the client and drafters ask a strategy for its traits. They have no torch. So this module and the
strategies' modules do not import torch. Code never compares names of strategies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from specq.protocol import Float64Array, Int32Array, Int64Array, Judgement, SamplingParams, UInt64Array
from specq.verification.judgements import Judgements
from specq.verification.packing import JudgedStep, Packed, Placed
from specq.verification.target_rows import TargetRows


class Draws(Protocol):
    """Uniform numbers in (0, 1)."""

    def accept(self, seeds: UInt64Array, positions: Int64Array, token_ids: Int64Array) -> Float64Array:
        """Return f64[n]: one number for each node, whose token i64[n] would have the position."""
        ...

    def residual(self, seeds: UInt64Array, positions: Int64Array) -> Float64Array:
        """Return f64[s]: one number for each session, whose correction or bonus has the position."""
        ...


class Strategy(ABC):
    """A rule that accepts drafted nodes. One instance per process, made without arguments.

    - `parameters`: the fields of `SamplingParams` that only this strategy reads, each with its help text.
    - `uses_drafts`: whether it reads drafts. If not, its jobs are not drafted for.
    - `takes_distributions`: whether at T > 0 it judges nodes by draft distributions that travel with them. The drafter
      must be trusted with these. It must not know the seed of the judge's draws.
    - `stops_at_accepted`: whether it judges siblings one by one, and ignores those after an accepted one.
    """

    parameters: ClassVar[Mapping[str, str]] = {}
    uses_drafts: ClassVar[bool] = True
    takes_distributions: ClassVar[bool] = False
    stops_at_accepted: ClassVar[bool] = False

    @abstractmethod
    def is_lossless(self, params: SamplingParams) -> bool:
        """Return whether the text has the target's own distribution. At T = 0: whether each token is the likeliest."""

    @abstractmethod
    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """Judge at least one step. Return one judgement each, in order."""

    def samples_drafts(self, params: SamplingParams) -> bool:
        """Return whether draft nodes are drawn and travel with their distributions. Otherwise all are point masses."""
        return self.takes_distributions and params.temperature > 0

    def says_own(self, params: SamplingParams) -> bool:
        """Return whether the token is the target's own without drafts, as `TargetRows.own_tokens` gives it.

        Then the next step can begin when only the device knows the token.
        """
        return False

    def follows_own(self, params: SamplingParams) -> bool:
        """Return whether the judgement of drafts also follows from the target's own token at each row.

        Then the device may choose these tokens in advance, and `judge_by_own` makes the judgements.
        """
        return False

    def judge_by_own(self, steps: Placed, packed: Packed, tokens: Int32Array) -> Judgements:
        """Judge steps that all follow their own tokens, given these tokens i32[rows] and the steps' rows."""
        raise NotImplementedError(f"{type(self).__name__} does not judge by the target's own tokens alone")

    def judging_temperature(self, params: SamplingParams) -> float:
        """Return the temperature of the target distributions that nodes are judged by."""
        return params.temperature
