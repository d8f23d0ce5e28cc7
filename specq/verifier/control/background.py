"""Sessions in the background fill what the others leave of a step.

While others decode, sessions in the background make their steps at most MOST_SLOWDOWN times as long, as a mean. Each
step with others earns that part of its seconds. What it takes beyond its seconds without rows in the background is
paid from what was saved. Steps form periods of PERIOD steps:

- The first PLAIN steps have no rows in the background. They show how long steps without them take. The first and the
  last of these do not count: the host's work for a step is also felt in the steps beside it.
- Then the number of decoding rows is chosen from what was saved. The same sessions decode until they end. Steps of
  changing sessions cost the host more, and overlap less. If one row costs more than a step earns, it joins as soon as
  enough is saved.
- Rows of prompts take what the decoding rows leave, in as few steps of the period as possible. Such a step takes at
  most MOST_LONGER times as long as without them.

What these rows add by the curve is corrected by what they really added, in sum over a period.

While a prompt of the others is computed, prompts in the background wait. Their decoding rows wait, too, if a step with
prompts has a large fixed cost. Without others nothing is limited. They have no draft nodes beside others.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array
from specq.verifier.models.step_curve import StepCurve

MOST_SLOWDOWN = 1.1  # mean factor on the seconds of the others' steps
EARNED = 0.9 * (MOST_SLOWDOWN - 1)  # part of a step; steps with prompts of the others are not counted
MOST_LONGER = 3.0  # factor on the seconds of a step with prompts in the background
PERIOD, PLAIN = 32, 4  # steps with others, and those of them without rows in the background
MOST_SAVED = 2.0  # earnings of so many periods
BASE_STEPS, MOST_PLAIN = 60, 2.0  # remembered steps without these rows; times their median that one counts at most
FADE, PRIOR_PERIODS = 0.25, 0.5  # weight of a new period; periods that the expectation counts for at first
LEAST_PRICE, MOST_PRICE = 0.1, 1000.0  # a curve may see nothing of what a second row adds
MOST_COUNTED = 16.0  # a step counts as at most this many times longer than one without the background
MOST_DEBT = 8.0  # steps without the background; other programs may have made a step long


class Waiting(NamedTuple):
    """The sessions that could join the next step.

    others        decoding sessions that are not in the background.
    decoding      decoding sessions in the background.
    has_prompts   whether sessions in the background have prompts to compute.
    behind_others   whether these wait for prompts of the others.
    """

    others: int
    decoding: int
    has_prompts: bool
    behind_others: bool = False


class BackgroundShare(NamedTuple):
    """What sessions in the background take of a step with others: decoding sessions, and seconds of rows of prompts."""

    decoding: int
    prompt_s: float


class ExpectedStep(NamedTuple):
    """The seconds of a step without its rows in the background, by the profile: the curve's scale follows shared steps.

    added_s   what rows in the background add.
    is_base   whether steps without these rows came before and come behind it.
    """

    base_s: float
    added_s: float = 0.0
    is_base: bool = False


class Background:
    """The seconds that sessions in the background have earned.

    is_used   whether the last step was shared.
    is_base   whether it had no rows in the background, and neither have the steps beside it.
    """

    def __init__(self) -> None:
        self.is_used, self._num_steps, self._num_decoding = False, 0, 0  # steps of this period; decoding rows in each
        self._saved_s = self._prompt_s = 0.0  # all; what rows of prompts may take of it. Negative: a debt
        self._plain: deque[float] = deque(maxlen=BASE_STEPS)
        self._base = self._price = 1.0  # seconds of steps without these rows, and of the rows, to the expected ones
        self._added = np.zeros(2)  # seconds that rows of this period added, and that they were expected to add
        self._means: Float64Array | None = None  # the same over periods

    @property
    def is_base(self) -> bool:
        return 1 < self._num_steps < PLAIN

    def share(self, waiting: Waiting, curve: StepCurve, fixed_s: float) -> BackgroundShare:
        """Return what they take of the next step.

        fixed_s   the fixed seconds of a step with prompts.
        """
        step_s = self._base * curve.profiled(waiting.others)
        earned_s = EARNED * step_s
        self._saved_s = min(self._saved_s + earned_s, MOST_SAVED * PERIOD * earned_s)
        times = curve.profiled_times(waiting.others, waiting.decoding + 1)
        added_s = (times - times[0]) * self._price
        self._num_steps = self._num_steps % PERIOD + 1
        if self._num_steps == PLAIN + 1:
            num = max(int(np.searchsorted(added_s, self._saved_s / (PERIOD - PLAIN), "right")) - 1, 0)
            self._prompt_s = self._saved_s - (PERIOD - PLAIN) * float(added_s[num])
            self._num_decoding = max(num, 1)
        if self._num_steps <= PLAIN or (waiting.behind_others and fixed_s > earned_s):
            return BackgroundShare(0, 0.0)
        num = min(self._num_decoding, waiting.decoding)
        num = num if added_s[num] <= self._saved_s else 0
        self._saved_s -= float(added_s[num])
        if not waiting.has_prompts or waiting.behind_others:
            return BackgroundShare(num, 0.0)
        most_s = max((MOST_LONGER - 1) * step_s, 2 * fixed_s)
        prompt_s = max(min(self._prompt_s, self._saved_s, most_s), 0.0)
        self._prompt_s -= prompt_s
        return BackgroundShare(num, prompt_s / max(self._price, 1.0))

    def spend(self, seconds: float) -> None:
        """Note that rows of prompts in the background are expected to take these seconds of the next step."""
        self._saved_s -= seconds * self._price

    def learn(self, expected: ExpectedStep, seconds: float) -> None:
        """Learn from the seconds of a step with others."""
        base_s = self._base * expected.base_s
        seconds = min(seconds, MOST_COUNTED * base_s)
        self._saved_s = max(self._saved_s + base_s + self._price * expected.added_s - seconds, -MOST_DEBT * base_s)
        if expected.is_base:
            self._plain.append(seconds / expected.base_s)
            self._base = float(np.minimum(self._plain, MOST_PLAIN * np.median(self._plain)).mean())
            self._learn_price()
        elif expected.added_s:
            self._added += seconds - base_s, expected.added_s

    def _learn_price(self) -> None:
        """Learn from the sums of a period, which has ended."""
        if self._added[1]:
            prior = np.full(2, PRIOR_PERIODS * FADE * self._added[1])
            before = prior if self._means is None else self._means
            self._means = before + FADE * (self._added - before)
            self._price = float(np.clip(self._means[0] / self._means[1], LEAST_PRICE, MOST_PRICE))
            self._added = np.zeros(2)
