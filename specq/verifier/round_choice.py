"""How deep a verifier's own drafter drafts for the next round: the rule of the scheduler, applied to the round as a whole.

Drafting in the verifier's process holds the next step up, so a level of the chains must bring more tokens a second than the
round without it. Known are: how likely the target commits a chain's i-th token given those before it, from what became of
earlier chains; what a level takes, measured at start-up and in service; and what the step takes (`StepCurve`), host work
included. The depth with the most tokens a second wins; 0 is a legal answer. Where it is 0, chains are tried now and then,
more and more rarely while they go on losing. No clock: times are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array
from specq.verifier.step_curve import StepCurve

MEMORY = 400.0  # chains after which a count has faded to 1/e
PRIOR_CHANCE, PRIOR_WEIGHT = 0.8, 4.0  # of a token that follows an accepted one; counts as so many chains
LEAST_PATIENCE, MOST_PATIENCE = 16, 512  # rounds without drafts between trials
TRIAL_DEPTH = 2
OUTLIER = 3.0  # times the expected seconds; such a draft had something else in it


class OtherLoad(NamedTuple):
    """What the step has beside the sessions that are drafted for: rows, and the tokens expected of them."""

    rows: int
    tokens: float


NOTHING = OtherLoad(0, 0.0)


class RoundChoice:
    """`levels`: seconds a level for so many sessions; `most`: levels at most."""

    def __init__(self, levels: StepCurve, most: int) -> None:
        self.levels, self.most = levels, most
        self._trials = np.zeros(most)
        self._right = np.zeros(most)
        self._patience = self._until_trial = LEAST_PATIENCE

    def promise(self) -> float:
        """Return how many tokens the deepest chain is expected to bring."""
        return float(np.cumprod(self.chances()).sum())

    def choose(self, num_sessions: int, curve: StepCurve, beside: OtherLoad = NOTHING) -> int:
        """Return the depth for a round of so many sessions, each with one row in the step beside its chain."""
        best = self._best(num_sessions, curve, beside)
        if best:
            self._patience = self._until_trial = LEAST_PATIENCE
            return best
        self._until_trial -= 1
        if self._until_trial > 0:
            return 0
        self._patience = self._until_trial = min(2 * self._patience, MOST_PATIENCE)
        return min(TRIAL_DEPTH, self.most)

    def _best(self, num_sessions: int, curve: StepCurve, beside: OtherLoad) -> int:
        depths = np.arange(self.most + 1)
        of_chains = np.concatenate(([1.0], 1.0 + np.cumsum(np.cumprod(self.chances()))))
        tokens = beside.tokens + num_sessions * of_chains
        steps = np.array([curve(beside.rows + num_sessions * (1 + depth)) for depth in depths.tolist()])
        return int(np.argmax(tokens / (steps + depths * self.levels(num_sessions))))

    def chances(self) -> Float64Array:
        """Return f64[most]: how likely each token of a chain is committed, given those before it."""
        total = (self._right.sum() + PRIOR_WEIGHT * PRIOR_CHANCE) / (self._trials.sum() + PRIOR_WEIGHT)
        found: Float64Array = (self._right + PRIOR_WEIGHT * total) / (self._trials + PRIOR_WEIGHT)
        return found

    def learn_draft(self, num_sessions: int, depth: int, seconds: float) -> None:
        """Take in what drafting took that began with contexts computed but for a round's tokens."""
        if seconds < OUTLIER * depth * self.levels(num_sessions):
            self.levels.learn(num_sessions, seconds / depth)

    def learn_chains(self, lengths: Sequence[int], followed: Sequence[int]) -> None:
        """Take in what became of some chains: how many of their tokens can be told right or wrong, and how many were right."""
        told, right = np.zeros(self.most + 1), np.zeros(self.most + 1)
        np.add.at(told, np.minimum(lengths, self.most), 1)
        np.add.at(right, np.minimum(followed, self.most), 1)
        fade = np.exp(-len(lengths) / MEMORY)
        self._trials = self._trials * fade + told[::-1].cumsum()[::-1][1:]
        self._right = self._right * fade + right[::-1].cumsum()[::-1][1:]
