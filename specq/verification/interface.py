"""What a verification strategy is: a rule that judges drafts, and what the rest of specq must know of that rule.

The broker, the client and drafters ask a strategy for its traits, and have no torch: so nothing here, and no module of
a strategy, imports torch. Nobody compares names of strategies.
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
        """Return f64[n]: one for each node, whose token i64[n] would take the position."""
        ...

    def residual(self, seeds: UInt64Array, positions: Int64Array) -> Float64Array:
        """Return f64[s]: one for each session, whose correction or bonus takes the position."""
        ...


class Strategy(ABC):
    """A rule that accepts drafted nodes. Made without arguments, once a process.

    parameters           the fields of `SamplingParams` that only this strategy reads, each with its help text
    uses_drafts          whether it looks at drafts at all; where not, nobody drafts
    takes_distributions  whether, at T > 0, nodes are drawn from draft distributions that travel with them, by which it
                         judges. The drafter must be trusted with those, and must not know the seed that keys the
                         judge's draws
    stops_at_accepted    whether siblings are judged one by one, and those after an accepted one not at all
    """

    parameters: ClassVar[Mapping[str, str]] = {}
    uses_drafts: ClassVar[bool] = True
    takes_distributions: ClassVar[bool] = False
    stops_at_accepted: ClassVar[bool] = False

    @abstractmethod
    def is_lossless(self, params: SamplingParams) -> bool:
        """Return whether the text has the target's own distribution: at T = 0, whether it is the likeliest token
        always."""

    @abstractmethod
    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """Judge some steps, at least one; one judgement each, in order."""

    def samples_drafts(self, params: SamplingParams) -> bool:
        """Return whether draft nodes are drawn and travel with their draft distributions; else all are point masses."""
        return self.takes_distributions and params.temperature > 0

    def says_own(self, params: SamplingParams) -> bool:
        """Return whether, where nothing was drafted, the token is the target's own, as `TargetRows.own_tokens` gives
        it: then nothing but the device need know it before the next step begins."""
        return False

    def follows_own(self, params: SamplingParams) -> bool:
        """Return whether the judgement of drafts, too, follows from the target's own token at each row: then the device
        may choose those before the host asks, and `judge_by_own` gives the judgements."""
        return False

    def judge_by_own(self, steps: Placed, packed: Packed, tokens: Int32Array) -> Judgements:
        """Judge steps all of which follow their own tokens, given these, i32[rows], and the steps' rows."""
        raise NotImplementedError(f"{type(self).__name__} does not judge by the target's own tokens alone")

    def judging_temperature(self, params: SamplingParams) -> float:
        """Return the temperature of the target distributions that nodes are judged by."""
        return params.temperature
