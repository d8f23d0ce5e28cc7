"""An arm that is not in use: what its trials have said, and when it is tried next. No clock: it counts windows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Windows before an arm's next trial: at first, later, at most.
FIRST_PATIENCE, LEAST_PATIENCE, MOST_PATIENCE = 1, 4, 256
MOST_OF_LOSERS = 1024  # where it was seen to lose so much
# Of the tokens: what all trials together may cost while little is known, and where the answer has stood for STANDING
# trials.
TRIALS_COST, STANDING_COST, STANDING = 0.01, 0.005, 4.0
# Standard errors that an arm has lost by; growth of the patience, from trial to trial.
GROWTH = ((6.0, 256), (3.0, 32), (1.0, 8), (0.0, 2))
NOISE, NOISE_WEIGHT = 0.12, 2.0  # of a trial, in logarithms, as it is believed before trials show it; in trials
MEMORY = 12.0  # trials after which one has faded to 1/e
DOUBTED = 0.25  # trials that a single one stands for, where it alone says that the arm that was in use loses


def affordable(lost: float, weight: float, num_challengers: int) -> int:
    """Return how many windows must lie between trials of an arm each of which loses the tokens of so many windows, as
    so many trials say, so that they cost no more than its share."""
    cost = TRIALS_COST + (STANDING_COST - TRIALS_COST) * min(weight / STANDING, 1.0)
    return min(math.ceil(max(lost, 0.0) * num_challengers / cost), MOST_OF_LOSERS)


@dataclass(slots=True)
class Challenger:
    """An arm that is not in use.

    gain, variance, weight  the mean of ln(its rate / that of the arm in use) over trials, its variance between them,
                            and how many
                trials they stand for; older ones fade
    lost        by its last trial, in windows of the arm in use
    is_put_off  whether its next trial was put off, since it promises a loss
    """

    patience: int = FIRST_PATIENCE
    until_trial: int = FIRST_PATIENCE
    gain: float = 0.0
    variance: float = NOISE**2
    weight: float = 0.0
    lost: float = 0.0
    is_put_off: bool = False

    def learn(self, gain: float, noise: float = 0.0) -> None:
        """Take a trial in; `noise`: the variance of its gain, as its steps show it."""
        self.weight = 1 + self.weight * math.exp(-1 / MEMORY)
        off = gain - self.gain
        self.gain += off / self.weight
        self.variance += (off * (gain - self.gain) - self.variance) / (self.weight + NOISE_WEIGHT)
        self.variance = max(self.variance, noise)

    def wait(self, num_challengers: int) -> None:
        """Set when it is tried next: so late that its trials cost its share, but not at once."""
        errors = -self.gain / self.error
        growth = next((growth for least, growth in GROWTH if errors >= least), GROWTH[-1][1])
        lost = max(self.lost, -self.gain)
        self.patience = min(growth * self.patience, max(affordable(lost, self.weight, num_challengers), LEAST_PATIENCE))
        self.until_trial, self.is_put_off = self.patience, False

    def doubt(self) -> None:
        """Set that it is tried again soon, and that this counts for more: one trial alone says that it loses, which may
        have met a hard passage of a text."""
        self.weight, self.is_put_off = DOUBTED, False
        self.patience = self.until_trial = LEAST_PATIENCE

    @property
    def error(self) -> float:
        """The standard error of the gain."""
        return math.sqrt(self.variance / max(self.weight, 1.0))

    def miss(self, num_challengers: int) -> None:
        """Set when it is tried next, where a source of it sent nothing or the load changed."""
        lost = affordable(self.lost, self.weight, num_challengers)
        self.patience = self.until_trial = max(min(2 * self.patience, MOST_PATIENCE), lost)

    def like(self) -> Challenger:
        """Return what is believed of the arm at a load that has not been measured: as if it had been tried once."""
        patience = min(self.patience, LEAST_PATIENCE)
        return replace(self, patience=patience, until_trial=patience, weight=min(self.weight, 1.0), is_put_off=False)
