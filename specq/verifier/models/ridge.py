"""Recursive ridge regression in which old pairs fade.

It is a Kalman filter with weights that drift (Haykin, "Adaptive Filter Theory", chapter 14).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specq.protocol import Float64Array

USUAL_FADE, DEVIATION_OF_MEAN = 0.05, 1.25  # weight of a new residual; ratio of standard to mean absolute deviation


class Ridge:
    """Learns weights w with y = w . x from one pair (x, y) after another.

    weights   f64[n]: the mean of the estimate of w.
    cov       f64[n, n]: its covariance.
    usual     the standard deviation of residuals.
    """

    def __init__(self, prior: Sequence[float], *, memory: float, usual: float, cut: float) -> None:
        """Begin with weights of 0.

        prior    standard deviations of the weights, which later ones never exceed.
        memory   the number of pairs after which a pair has faded.
        usual    the standard deviation of residuals at first.
        cut      the most standard deviations that a residual counts as: a larger one counts as noisier.
        """
        self._most: Float64Array = np.square(np.array(prior, np.float64))
        self._memory, self._cut = memory, cut
        self._drift = 1.0 / (memory**2 * float(self._most.mean()))
        self.weights: Float64Array = np.zeros(len(prior))
        self.cov: Float64Array = np.diag(self._most)
        self._variances: Float64Array = np.einsum("ii->i", self.cov)  # a view
        self.usual = usual

    def learn(self, x: Float64Array, y: float, least: float = 0.0) -> None:
        """Learn from a pair. `least`: the least standard deviation of y."""
        deviation = max(self.usual, least)
        error = y - float(self.weights.dot(x))
        # Drift makes all weights less certain, but none less than the prior.
        self._variances += np.minimum(self._drift * self.usual**2 * self._most, self._most - self._variances)
        of_x = self.cov.dot(x)
        gain = of_x / (float(x.dot(of_x)) + max(deviation, abs(error) / self._cut) ** 2)
        self.weights += gain * error
        self.cov -= gain[:, None] * of_x
        self.usual += USUAL_FADE * (DEVIATION_OF_MEAN * min(abs(error), self._cut * deviation) - self.usual)

    def deviation(self, x: Float64Array) -> float:
        """Return the standard deviation of w . x, without the part that always remains because old pairs fade."""
        return math.sqrt(max(float(x @ self.cov @ x) - self.usual**2 / self._memory, 0.0))
