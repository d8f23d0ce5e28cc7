"""Sessions in the background fill what the others leave of a step.

While others decode, sessions in the background make their steps at most MOST_SLOWDOWN times as long, as a mean. Each
step with others earns that part of its expected seconds, and rows in the background spend it. Steps form periods of
PERIOD steps:

- The number of decoding rows is chosen once a period, from what was saved until then. The same sessions decode until
  they end. Steps of changing sessions cost the host more, and overlap less. If a single row costs more than a step
  earns, it joins as soon as enough is saved.
- Rows of prompts take what the decoding rows leave, in one step of a period. A step with prompts takes longer than
  others. It takes at most MOST_LONGER times as long as without them.
- The last two steps of a period have no rows in the background. The first of these still has the host's work for the
  rows of the step before. The second one shows how long steps without them take. Sessions of a batch that come and go
  make some of these long, too. So the median of the last ones is the measure.

What decoding rows and rows of prompts really add is learned. A learned price may be wrong, for a while or for some kind
of step. So what a step took beyond its plan is paid from the savings, and what it took less is saved.

While a prompt of the others is computed, prompts in the background wait. Their decoding rows wait, too, if a step with
prompts has a large fixed cost. Without others nothing is limited. They have no draft nodes beside others.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from specq.verifier.models.step_curve import StepCurve

MOST_SLOWDOWN = 1.1  # mean factor on the seconds of the others' steps
MOST_LONGER = 3.0  # factor on the seconds of a step with prompts in the background
PERIOD = 32  # steps with others
MOST_SAVED = 2.0  # earnings of so many periods
BASE_STEPS = 15  # steps without rows in the background that are remembered
FADE, PRIOR_STEPS = 0.02, 10.0  # weight of a new step with such rows; steps that the expectation counts for at first
MOST_ERROR = 4.0  # a step counts as at most this many times longer than expected
LEAST_PRICE, MOST_PRICE = 0.1, 1000.0  # a curve may see nothing of what a second row adds
MOST_COUNTED = 16.0  # a step is paid as at most this many times longer than one without the background
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

    added_s     what decoding rows in the background add.
    prompt_s    what rows of their prompts add.
    is_second   whether the step before had none of these rows, either.
    """

    base_s: float
    added_s: float = 0.0
    prompt_s: float = 0.0
    is_second: bool = False


class _Price:
    """What rows take, relative to the expected seconds: the ratio of two means over steps."""

    def __init__(self) -> None:
        self.value = 1.0
        self._means: tuple[float, float] | None = None

    def learn(self, took_s: float, expected_s: float) -> None:
        came, foreseen = self._means or (PRIOR_STEPS * FADE * expected_s,) * 2
        self._means = came + FADE * (took_s - came), foreseen + FADE * (expected_s - foreseen)
        self.value = min(max(self._means[0] / self._means[1], LEAST_PRICE), MOST_PRICE)


class Background:
    """The seconds that sessions in the background have earned.

    is_used   whether the last step was shared.
    is_second   whether the last step is the second one without rows in the background.
    """

    def __init__(self) -> None:
        self.is_used, self._decoding, self._prompts = False, _Price(), _Price()
        self._saved_s = self._prompt_s = 0.0  # all; what rows of prompts may take of it. Negative: a debt
        self._num_steps = self._num_decoding = 0  # steps of this period; decoding rows in each of them
        self._plain: deque[float] = deque(maxlen=BASE_STEPS)
        self._base = 1.0  # seconds of steps without rows in the background, relative to the expected ones

    @property
    def is_second(self) -> bool:
        return self._num_steps == PERIOD

    def share(self, waiting: Waiting, curve: StepCurve, fixed_s: float) -> BackgroundShare:
        """Return what they take of the next step.

        fixed_s   the fixed seconds of a step with prompts.
        """
        step_s = self._base * curve.profiled(waiting.others)
        earned_s = (MOST_SLOWDOWN - 1) * step_s
        self._saved_s = min(self._saved_s + earned_s, MOST_SAVED * PERIOD * earned_s)
        times = curve.profiled_times(waiting.others, waiting.decoding + 1)
        added_s = (times - times[0]) * self._decoding.value
        self._num_steps = self._num_steps % PERIOD + 1
        if self._num_steps == 1:
            num = int(np.searchsorted(added_s, self._saved_s / (PERIOD - 2), "right")) - 1
            left_s = max(self._saved_s - (PERIOD - 2) * float(added_s[num]), 0.0)
            most_s = max((MOST_LONGER - 1) * step_s, 2 * fixed_s * self._prompts.value)
            self._num_decoding, self._prompt_s = max(num, 1), min(left_s, most_s)
        if self._num_steps >= PERIOD - 1 or (waiting.behind_others and fixed_s > earned_s):
            return BackgroundShare(0, 0.0)
        num = min(self._num_decoding, waiting.decoding)
        num = num if added_s[num] <= self._saved_s else 0
        self._saved_s -= float(added_s[num])
        if not waiting.has_prompts or waiting.behind_others:
            return BackgroundShare(num, 0.0)
        prompt_s, self._prompt_s = max(min(self._prompt_s, self._saved_s), 0.0), 0.0
        return BackgroundShare(num, prompt_s / self._prompts.value)

    def spend(self, seconds: float) -> None:
        """Note that rows of prompts in the background are expected to take these seconds of the next step."""
        self._saved_s -= seconds * self._prompts.value

    def learn(self, expected: ExpectedStep, seconds: float) -> None:
        """Learn from the seconds of a step with others."""
        base_s = self._base * expected.base_s
        planned_s = self._decoding.value * expected.added_s + self._prompts.value * expected.prompt_s
        self._saved_s -= min(seconds, MOST_COUNTED * base_s) - base_s - planned_s
        self._saved_s = max(self._saved_s, -MOST_DEBT * base_s)
        if expected.prompt_s:
            took_s = seconds - base_s - self._decoding.value * expected.added_s
            self._prompts.learn(min(took_s, MOST_LONGER * base_s), expected.prompt_s)
        elif expected.added_s:
            self._decoding.learn(min(seconds - base_s, MOST_ERROR * base_s), expected.added_s)
        elif expected.is_second:
            self._plain.append(seconds / expected.base_s)
            self._base = median(self._plain)
