"""Calibrates the scores of a lane: from predicted to measured acceptance.

For each node, a drafter predicts the probability that the target commits it, given the commit of its parent. Measured
is the committed share, by bin of the prediction. A node whose parent is off the target's path gives no evidence and is
not counted. Old counts fade, so a drafter that improves or degrades is noticed.

Rule: a false prediction has no benefit. After a few verdicts the estimate is the measurement, for any prediction.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specq.protocol import BoolArray, Float32Array, Float64Array, Int64Array

NUM_BINS = 12
PRIOR_WEIGHT = 2.0  # a prediction has the weight of this many verdicts
MEMORY = 200.0  # verdicts after which a count has faded to 1/e

_MIDDLES = tuple((i + 0.5) / NUM_BINS for i in range(NUM_BINS))
_FADE = 1.0 - 1.0 / MEMORY


class Calibration:
    """The measured acceptance of one lane, by bin of the predicted probability.

    The counts are in two sequences of NUM_BINS numbers: new ones, or those given.
    """

    __slots__ = ("_accepted", "_trials")

    def __init__(self, trials: Any = None, accepted: Any = None) -> None:
        self._trials = [0.0] * NUM_BINS if trials is None else trials
        self._accepted = [0.0] * NUM_BINS if accepted is None else accepted

    def probability(self, score: float) -> float:
        """Return the estimated acceptance of a node with the predicted log-probability `score`, given its parent's."""
        predicted = math.exp(score) if score < 0.0 else 1.0
        i = int(predicted * NUM_BINS) if predicted < 1.0 else NUM_BINS - 1
        found: float = (self._accepted[i] + PRIOR_WEIGHT * predicted) / (self._trials[i] + PRIOR_WEIGHT)
        return found

    def reliability(self) -> float:
        """Return the ratio of measured to predicted acceptance over all bins, at most 1.

        Use it for a bin without verdicts.
        """
        predicted = came_true = 0.0
        for middle, trials, accepted in zip(_MIDDLES, self._trials, self._accepted, strict=True):
            predicted += middle * trials
            came_true += accepted
        return min((came_true + 0.5) / (predicted + 0.5), 1.0)

    def observe(self, score: float, accepted: bool) -> None:
        """Count one node whose parent was committed. `accepted`: the node was committed, too."""
        predicted = math.exp(score) if score < 0.0 else 1.0
        i = int(predicted * NUM_BINS) if predicted < 1.0 else NUM_BINS - 1
        self._trials[i] = self._trials[i] * _FADE + 1.0
        self._accepted[i] = self._accepted[i] * _FADE + accepted

    def probabilities(self, scores: Float32Array) -> Float64Array:
        """Return `probability` of each score in an array."""
        predicted, bins = _binned(scores)
        found: Float64Array = np.array(self._accepted)[bins] + PRIOR_WEIGHT * predicted
        found /= np.array(self._trials)[bins] + PRIOR_WEIGHT
        return found

    def observe_all(self, scores: Float32Array, accepted: BoolArray) -> None:
        """Count many nodes at once, as `observe` counts one."""
        _, bins = _binned(scores)
        counts = np.bincount(bins, minlength=NUM_BINS)
        num_accepted = np.bincount(bins, accepted, NUM_BINS)
        for i in np.flatnonzero(counts).tolist():
            fade = _FADE ** int(counts[i])
            self._trials[i] = self._trials[i] * fade + float(counts[i])
            self._accepted[i] = self._accepted[i] * fade + float(num_accepted[i])


def _binned(scores: Float32Array) -> tuple[Float64Array, Int64Array]:
    """Return the predicted probabilities f64[...] of scores f32[...], and their bins i64[...]."""
    predicted: Float64Array = np.exp(np.minimum(scores, 0.0), dtype=np.float64)
    bins: Int64Array = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return predicted, bins
