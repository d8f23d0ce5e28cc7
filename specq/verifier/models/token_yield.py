"""What a source of drafts brings: how many of its tokens a session's round accepts, level by level.

A level is the number of drafted tokens above a node. It counts as rejected also if the accepted node above it is one
that has no children, as siblings of a chain. Counts of older rounds fade. If the last rounds clearly differ from the
others, the others are forgotten: the texts have changed. While a source is silent, its counts weigh less and less,
since its drafts may have become better. Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array

NUM_LEVELS = 12
MEMORY, RECENT = 200.0, 12.0  # rounds after which one has faded to 1/e; of those that are held against the others
FEWEST_STEPS = 6.0  # likewise, where a step has many rounds
CHANGED = 4.0  # standard errors that the recent ones must differ by
FEWEST_JUDGED = 6.0  # levels that they must have tried
LEAST_CHANGE = 0.1  # of the tokens of a round
SILENCE_FADE, LEAST_WORTH = 0.03, 0.5  # of what counts are worth, with each silent step; rounds
PRIOR_CHANCE, PRIOR_ROUNDS = 0.7, 2.0  # of a token, before anything is known; how many rounds that is worth
LEAST_VARIANCE = 0.5  # of the tokens of a round
MOST_CHANCE = 0.985
NO_NODES: Float64Array = np.zeros(NUM_LEVELS)
ASKED, NODES, TRIED, ACCEPTED = range(4)


class Judged(NamedTuple):
    """What became of a source's drafts in a step, also of those that another source drafted too.

    num_rounds   sessions that it drafted for
    nodes        f64[NUM_LEVELS]: nodes of each level that were verified
    tried        f64[NUM_LEVELS]: rounds in which a level was verified, and the one before it accepted
    accepted     f64[NUM_LEVELS]: rounds in which a node of each level was accepted
    """

    num_rounds: int
    nodes: Float64Array
    tried: Float64Array
    accepted: Float64Array


class _Counts:
    """Sums over rounds.

    levels   f64[4, NUM_LEVELS]: rounds in which each level was asked for; the other rows as in `Judged`, but that the
             first level is tried in each round
    """

    def __init__(self) -> None:
        self.rounds = self.squares = 0.0
        self.levels: Float64Array = np.zeros((4, NUM_LEVELS))

    def fade(self, part: float) -> None:
        self.rounds *= part
        self.squares *= part
        self.levels *= part

    def add(self, judged: Judged, depth: int, num_accepted: float, memory: float) -> None:
        """Add a step whose drafts had at most `depth` levels."""
        self.fade(math.exp(-min(judged.num_rounds / memory, 1 / FEWEST_STEPS)))
        self.rounds += judged.num_rounds
        self.squares += num_accepted**2 / judged.num_rounds
        self.levels[ASKED, :depth] += judged.num_rounds
        self.levels[NODES:] += judged.nodes, judged.tried, judged.accepted
        self.levels[TRIED, 0] += judged.num_rounds - judged.tried[0]

    def become(self, other: _Counts) -> None:
        self.rounds, self.squares, self.levels = other.rounds, other.squares, other.levels.copy()


class TokenYield:
    """What one source brings.

    worth     how many rounds its counts are worth
    most      levels that it was seen to draft
    """

    def __init__(self) -> None:
        self._all, self._recent = _Counts(), _Counts()
        self.worth, self.most = 0.0, 0
        self._before: Float64Array | None = None  # chances, as they were before the last silence

    def learn(self, judged: Judged, depth: int = NUM_LEVELS) -> bool:
        """Take in a step for which it was asked for `depth` levels; return whether the texts have changed."""
        if self.worth < self._all.rounds:
            self._before = self._chances()
            for counts in (self._all, self._recent):
                counts.fade(min(self.worth / max(counts.rounds, self.worth), 1.0))
        num_accepted = float(judged.accepted.sum())
        drafted = judged.nodes.nonzero()[0]
        if len(drafted):
            self.most = max(self.most, int(drafted[-1]) + 1)
        self._all.add(judged, depth, num_accepted, MEMORY)
        self._recent.add(judged, depth, num_accepted, RECENT)
        has_changed = self._has_changed()
        if has_changed:
            self._all.become(self._recent)
            self._before = None
        self.worth = self._all.rounds
        return has_changed

    def _has_changed(self) -> bool:
        """Return whether the chance of a node has changed in the last rounds (a test of two proportions)."""
        now, before = self._recent, self._all
        num_now, accepted_now = now.levels[[TRIED, ACCEPTED]].sum(1).tolist()
        num_before, accepted_before = before.levels[[TRIED, ACCEPTED]].sum(1).tolist()
        if num_now < FEWEST_JUDGED or before.rounds < 2 * now.rounds:
            return False
        chance = accepted_before / num_before
        error = math.sqrt(max(chance * (1 - chance), 0.05) / num_now)
        usual = accepted_before / before.rounds
        is_evident: bool = abs(accepted_now / num_now - chance) > CHANGED * error
        return is_evident and abs(accepted_now / now.rounds - usual) > LEAST_CHANGE * (1 + usual)

    def pass_by(self) -> None:
        """Take in a step in which it was silent."""
        if self.worth > LEAST_WORTH:
            self.worth = max(self.worth * (1 - SILENCE_FADE), LEAST_WORTH)

    def reach(self) -> Float64Array:
        """Return f64[NUM_LEVELS]: the part of rounds in which a node of each level is accepted."""
        found: Float64Array = np.cumprod(self._chances(), dtype=np.float64)
        return found

    def _chances(self) -> Float64Array:
        """Return f64[NUM_LEVELS]: the same, given the level before; what was known before a silence is the prior of
        what comes after it."""
        tried, accepted = self._all.levels[[TRIED, ACCEPTED]]
        known = (float(accepted.sum()) + PRIOR_ROUNDS * PRIOR_CHANCE) / (float(tried.sum()) + PRIOR_ROUNDS)
        prior: Float64Array = np.full(NUM_LEVELS, known) if self._before is None else self._before
        chances: Float64Array = ((accepted + PRIOR_ROUNDS * prior) / (tried + PRIOR_ROUNDS)).astype(np.float64)
        return np.minimum(chances, MOST_CHANCE, out=chances)

    def nodes(self) -> Float64Array:
        """Return f64[NUM_LEVELS]: the nodes of each level that are verified in a round."""
        asked, nodes = self._all.levels[[ASKED, NODES]]
        usual = (float(nodes.sum()) + 1) / (float(asked.sum()) + 1)
        found: Float64Array = (nodes + usual) / (asked + 1)
        return found

    @property
    def variance(self) -> float:
        """Of what is believed of the tokens of a round."""
        of_rounds = 0.0
        if self._all.rounds:
            mean = float(self._all.levels[ACCEPTED].sum()) / self._all.rounds
            of_rounds = self._all.squares / self._all.rounds - mean**2
        return max(of_rounds, LEAST_VARIANCE) / (self.worth + 0.5)
