"""What a source of drafts brings: how many of its tokens a session's round accepts, level by level.

The level of a node is the number of drafted tokens above it. A level counts as tried in a round if two things hold: any
node of it was verified, and a node of the level before was accepted. The first level counts as tried in every round. So
a level also counts as rejected if the accepted node has no children, such as a sibling in a chain.

Counts of older rounds fade. If the last rounds clearly differ from the others, the texts have changed, and the others
are forgotten. While a source is silent, its counts weigh less and less, since its drafts may have become better. Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array

NUM_LEVELS = 12
ALL, LAST = range(2)
MEMORIES = 200.0, 12.0  # rounds after which a round has faded to 1/e, in the counts of all and of the last rounds
FEWEST_STEPS = 6.0  # steps that this takes at least, if steps have many rounds
CHANGED = 4.0  # standard errors by which the recent acceptance rate must differ from that of all counts
FEWEST_JUDGED = 6.0  # levels that the recent rounds must have tried
LEAST_CHANGE = 0.1  # part of a round's tokens by which the recent rounds must differ
SILENCE_FADE, LEAST_WORTH = 0.03, 0.5  # part of the worth that each silent step takes; least worth in rounds
PRIOR_CHANCE, PRIOR_ROUNDS = 0.7, 2.0  # acceptance rate before any counts; its weight in rounds
LEAST_VARIANCE = 0.5  # least variance of the tokens of a round
MOST_CHANCE = 0.985  # highest acceptance rate of a level
NO_NODES: Float64Array = np.zeros(NUM_LEVELS)
ASKED, NODES, TRIED, ACCEPTED = range(4)


class Judged(NamedTuple):
    """The results of a source's drafts in a step, including nodes that another source drafted too.

    num_rounds   sessions that the source drafted for.
    nodes        f64[NUM_LEVELS]: nodes of each level that were verified.
    tried        f64[NUM_LEVELS]: rounds in which any node of the level was verified, and the level before accepted.
    accepted     f64[NUM_LEVELS]: rounds in which a node of each level was accepted.
    """

    num_rounds: int
    nodes: Float64Array
    tried: Float64Array
    accepted: Float64Array


class TokenYield:
    """The acceptance of one source's drafts.

    worth   the weight of its counts, in rounds.
    most    the most levels that it has drafted.

    Counts are sums over rounds in which older rounds fade: over all rounds (ALL), and over the last ones (LAST).

    _rounds    f64[2]: the number of rounds.
    _squares   f64[2]: the sum over rounds of the squared mean of accepted tokens in their step.
    _levels    f64[2, 4, NUM_LEVELS]. ASKED: rounds in which each level was asked for. The other rows are as in
               `Judged`, but the first level counts as tried in each round.
    """

    def __init__(self) -> None:
        self._rounds, self._squares = np.zeros(2), np.zeros(2)
        self._levels: Float64Array = np.zeros((2, 4, NUM_LEVELS))
        self.worth, self.most = 0.0, 0
        self._before: Float64Array | None = None  # acceptance rates before the last silence

    def learn(self, judged: Judged, depth: int = NUM_LEVELS) -> bool:
        """Learn from a step in which it was asked for `depth` levels; return whether the texts have changed."""
        count, nodes, tried, accepted = judged
        rounds = self._rounds.tolist()
        if self.worth < rounds[ALL]:
            self._before = self._chances()
            self._fade(np.array([min(self.worth / max(one, self.worth), 1.0) for one in rounds]))
        drafted = nodes.nonzero()[0]
        if len(drafted):
            self.most = max(self.most, int(drafted[-1]) + 1)
        self._fade(np.array([math.exp(-min(count / memory, 1 / FEWEST_STEPS)) for memory in MEMORIES]))
        self._rounds += count
        self._squares += float(accepted.sum()) ** 2 / count
        self._levels[:, ASKED, :depth] += count
        self._levels[:, NODES:] += np.array([nodes, tried, accepted])
        self._levels[:, TRIED, 0] += count - tried[0]
        has_changed = self._has_changed()
        if has_changed:
            for counts in (self._rounds, self._squares, self._levels):
                counts[ALL] = counts[LAST]
            self._before = None
        self.worth = float(self._rounds[ALL])
        return has_changed

    def _fade(self, parts: Float64Array) -> None:
        """Keep these parts, f64[2], of the counts."""
        self._rounds *= parts
        self._squares *= parts
        self._levels *= parts[:, None, None]

    def _has_changed(self) -> bool:
        """Return whether the acceptance rate has changed in the last rounds (a test of two proportions)."""
        (num_before, accepted_before), (num_now, accepted_now) = self._levels[:, TRIED:].sum(2).tolist()
        before, now = self._rounds.tolist()
        if num_now < FEWEST_JUDGED or before < 2 * now:
            return False
        chance = accepted_before / num_before
        error = math.sqrt(max(chance * (1 - chance), 0.05) / num_now)
        usual = accepted_before / before
        is_evident: bool = abs(accepted_now / num_now - chance) > CHANGED * error
        return is_evident and abs(accepted_now / now - usual) > LEAST_CHANGE * (1 + usual)

    def pass_by(self) -> None:
        """Note a step in which the source was silent."""
        if self.worth > LEAST_WORTH:
            self.worth = max(self.worth * (1 - SILENCE_FADE), LEAST_WORTH)

    def reach(self) -> Float64Array:
        """Return f64[NUM_LEVELS]: the part of rounds in which a node of each level is accepted."""
        found: Float64Array = self._chances().cumprod()
        return found

    def _chances(self) -> Float64Array:
        """Return f64[NUM_LEVELS]: the acceptance rate of each level, given that the level before was accepted.

        After a silence, the rates before it are the prior.
        """
        tried, accepted = self._levels[ALL, TRIED:]
        known = (float(accepted.sum()) + PRIOR_ROUNDS * PRIOR_CHANCE) / (float(tried.sum()) + PRIOR_ROUNDS)
        prior = known if self._before is None else self._before
        chances: Float64Array = (accepted + PRIOR_ROUNDS * prior) / (tried + PRIOR_ROUNDS)
        return np.minimum(chances, MOST_CHANCE, out=chances)

    def nodes(self) -> Float64Array:
        """Return f64[NUM_LEVELS]: the expected nodes of each level that are verified in a round."""
        asked, nodes = self._levels[ALL, :TRIED]
        usual = (float(nodes.sum()) + 1) / (float(asked.sum()) + 1)
        found: Float64Array = (nodes + usual) / (asked + 1)
        return found

    @property
    def variance(self) -> float:
        """The variance of the estimated tokens of a round."""
        of_rounds, rounds = 0.0, float(self._rounds[ALL])
        if rounds:
            mean = float(self._levels[ALL, ACCEPTED].sum()) / rounds
            of_rounds = float(self._squares[ALL]) / rounds - mean**2
        return max(of_rounds, LEAST_VARIANCE) / (self.worth + 0.5)
