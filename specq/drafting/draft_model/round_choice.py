"""How deep a colocated drafter drafts for the next round: the rule of the scheduler, applied to the round as a whole.

Drafting in the verifier's process delays the next step, so a level of the chains must bring more tokens a second than
the round without it. Three things are known: how likely the target commits a chain's i-th token given those before it,
from what became of earlier chains; what a level takes, measured at start-up and in service; and what the step takes
(`StepCurve`), host work included, and its rows: what has none is not verified, and brings nothing. The depth with the
most tokens a second wins; 0 is a legal answer. Where it is 0, chains are tried now and then, and more rarely each time
they lose again. No clock: times are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array
from specq.verifier.sources import UNBOUNDED, Patience, StepCurve

MEMORY = 400.0  # chains after which a count has faded to 1/e
PRIOR_ACCEPT_PROB, PRIOR_WEIGHT = 0.8, 4.0  # of a token that follows an accepted one; the weight is a number of chains
LEAST_PATIENCE, MOST_PATIENCE = 16, 512  # rounds without drafts between trials
TRIAL_DEPTH = 2
OUTLIER = 3.0  # times the expected seconds; something else happened during such a draft


class OtherLoad(NamedTuple):
    """What the step has beside the sessions that are drafted for: rows, and the tokens expected of them."""

    rows: int
    tokens: float


NO_LOAD = OtherLoad(0, 0.0)


class RoundChoice:
    """`levels`: the seconds that one level takes, by the number of sessions; `most`: levels at most; `is_one_pass`: a
    draft takes as long as `most` levels, however deep it is."""

    def __init__(self, levels: StepCurve, most: int, *, is_one_pass: bool = False) -> None:
        self.levels, self.most, self._is_one_pass = levels, most, is_one_pass
        self._trials = np.zeros(most)
        self._accepted = np.zeros(most)
        self._patience = Patience(LEAST_PATIENCE, MOST_PATIENCE)
        self._foreseen: tuple[int, int] | None = None  # sessions, and the best depth for these

    def promise(self) -> float:
        """Return how many tokens the deepest chain is expected to bring."""
        return float(np.cumprod(self.accept_probs()).sum())

    def choose(self, num_sessions: int, curve: StepCurve, other: OtherLoad = NO_LOAD, max_rows: int = UNBOUNDED) -> int:
        """Return the depth for a round of this many sessions, each with one row in the step beside its chain; max_rows:
        of the step."""
        foreseen, self._foreseen = self._foreseen, None
        is_foreseen = foreseen is not None and foreseen[0] == num_sessions and other == NO_LOAD
        best = foreseen[1] if foreseen is not None and is_foreseen else self.best(num_sessions, curve, other, max_rows)
        if best:
            self._patience.reset()
            return best
        self._patience.pass_round()
        if not self._patience.is_over:
            return 0
        self._patience.lengthen()
        return min(TRIAL_DEPTH, self.most)

    def foresee(self, num_sessions: int, curve: StepCurve, max_rows: int = UNBOUNDED) -> None:
        """Look now for what `choose` will look for next, if as many sessions are drafted for alone then."""
        self._foreseen = num_sessions, self.best(num_sessions, curve, max_rows=max_rows)

    def best(self, num_sessions: int, curve: StepCurve, other: OtherLoad = NO_LOAD, max_rows: int = UNBOUNDED) -> int:
        """Return the depth with the most tokens a second for a round of this many sessions."""
        depths = np.arange(self.most + 1)
        num_rows = other.rows + num_sessions
        num_nodes = np.minimum(num_sessions * depths, max(max_rows - num_rows, 0))  # that are verified, level by level
        of_levels = np.cumprod(self.accept_probs()) * np.diff(num_nodes)
        tokens = other.tokens + num_sessions + np.concatenate(([0.0], np.cumsum(of_levels)))
        steps = np.array([curve(num_rows + count, count) for count in num_nodes.tolist()])
        drafts = np.minimum(depths, 1) * self.most if self._is_one_pass else depths  # in levels
        return int(np.argmax(tokens / (steps + drafts * self.levels(num_sessions))))

    def accept_probs(self) -> Float64Array:
        """Return f64[most]: how likely each token of a chain is committed, given those before it."""
        num_accepted, num_judged = self._accepted.sum(), self._trials.sum()
        overall = (num_accepted + PRIOR_WEIGHT * PRIOR_ACCEPT_PROB) / (num_judged + PRIOR_WEIGHT)
        found: Float64Array = (self._accepted + PRIOR_WEIGHT * overall) / (self._trials + PRIOR_WEIGHT)
        return found

    def draft_s(self, num_sessions: int, depth: int) -> float:
        """Return the expected seconds of a draft."""
        return self._num_levels(depth) * self.levels(num_sessions)

    def _num_levels(self, depth: int) -> int:
        return self.most if self._is_one_pass else depth

    def learn_draft(self, num_sessions: int, depth: int, seconds: float) -> None:
        """Take in the seconds of a draft whose contexts were computed except for the last round's tokens."""
        if seconds < OUTLIER * self.draft_s(num_sessions, depth):
            self.levels.learn(num_sessions, seconds / self._num_levels(depth))

    def learn_chains(self, num_judged: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Take in what became of some chains: how many tokens of each were judged, and how many of these were
        accepted."""
        fade = np.exp(-len(num_judged) / MEMORY)
        self._trials = self._trials * fade + self._at_depths(num_judged)
        self._accepted = self._accepted * fade + self._at_depths(num_accepted)

    def _at_depths(self, lengths: Sequence[int]) -> Float64Array:
        """Return f64[most]: how many of these lengths reach each depth, from 1 on."""
        counts = np.zeros(self.most + 1)
        np.add.at(counts, np.minimum(lengths, self.most), 1)
        found: Float64Array = counts[::-1].cumsum()[::-1][1:]
        return found
