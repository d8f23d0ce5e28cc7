"""Sessions in the background fill what the others leave of a step.

While others decode, sessions in the background make their steps at most MOST_SLOWDOWN times as long, as a mean. Each
step with others earns that part of its expected seconds. Rows in the background spend it: a half goes to decoding rows,
the other half to rows of prompts, and what one of them does not need goes to the other.

- Decoding rows spend what one step earns. If that is less than one row, they save for one row.
- Rows of prompts save for one step in PROMPTS_EVERY. A step with prompts takes longer than others. So the other
  steps keep to MOST_SLOWDOWN. That step takes at most MOST_LONGER times as long as without them.

What decoding rows and rows of prompts really add is learned from steps with and without them: two steps in PLAIN_EVERY
have none. The first of these still has the host's work for the rows of the step before, so only the second one counts.
Sessions of a batch that come and go make some of these long, too. So the median of the last ones is the measure.
A learned price may be wrong, for a while or for some kind of step. So what a step took beyond its plan is a debt. It is
paid from what the next steps earn, before anything is spent. What a step took less is a credit.

While a prompt of the others is computed, theirs wait. Their decoding rows wait, too, if a step with prompts has a large
fixed cost, or if none of the others decodes. Without others nothing is limited. They have no draft nodes beside others.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from specq.verifier.models.step_curve import StepCurve

MOST_SLOWDOWN = 1.1  # mean factor on the seconds of the others' steps
PROMPTS_EVERY = 20  # steps with others
MOST_LONGER = 3.0  # factor on the seconds of a step with prompts in the background
PLAIN_EVERY = 32  # steps with others
BASE_STEPS = 15  # steps without rows in the background that are remembered
FADE, PRIOR_STEPS = 0.02, 10.0  # weight of a new step with such rows; steps that the expectation counts for at first
MOST_ERROR = 4.0  # a step counts as at most this many times longer than expected
LEAST_PRICE, MOST_PRICE = 0.1, 1000.0  # a curve may see nothing of what a second row adds
MOST_COUNTED = 16.0  # a step enters the debt as at most this many times longer than one without the background
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
        self._prompt_s = self._decoding_s = 0.0
        self._num_steps = self._num_shared = 0  # steps since rows of prompts spent something; of PLAIN_EVERY
        self._plain: deque[float] = deque(maxlen=BASE_STEPS)
        self._base = 1.0  # seconds of steps without rows in the background, relative to the expected ones
        self._debt_s = 0.0  # negative: a credit

    @property
    def is_second(self) -> bool:
        return self._num_shared == PLAIN_EVERY

    def share(self, waiting: Waiting, curve: StepCurve, fixed_s: float) -> BackgroundShare:
        """Return what they take of the next step.

        fixed_s   the fixed seconds of a step with prompts.
        """
        step_s = self._base * curve.profiled(waiting.others)
        earned_s = self._pay((MOST_SLOWDOWN - 1) * step_s)
        to_prompts = earned_s * (waiting.has_prompts * (0.5 if waiting.decoding else 1.0))
        times = curve.profiled_times(waiting.others, waiting.decoding + 1)
        added_s = (times - times[0]) * self._decoding.value
        self._num_shared = self._num_shared % PLAIN_EVERY + 1
        if self._num_shared >= PLAIN_EVERY - 1 or (waiting.behind_others and fixed_s > earned_s):
            self._decoding_s = min(self._decoding_s + earned_s, 2 * earned_s)
            return BackgroundShare(0, 0.0)
        self._decoding_s += earned_s - to_prompts
        num_decoding = int(np.searchsorted(added_s, self._decoding_s, "right")) - 1
        self._decoding_s -= float(added_s[num_decoding])
        if num_decoding == waiting.decoding:
            to_prompts, self._decoding_s = to_prompts + self._decoding_s, 0.0
        else:
            self._decoding_s = min(self._decoding_s, max(float(added_s[1]), earned_s))
        most_s = max((MOST_LONGER - 1) * step_s, 2 * fixed_s * self._prompts.value)
        self._prompt_s = min(self._prompt_s + to_prompts, most_s) if waiting.has_prompts else 0.0
        self._num_steps += 1
        is_due = self._num_steps >= PROMPTS_EVERY and not waiting.behind_others
        return BackgroundShare(num_decoding, self._prompt_s / self._prompts.value if is_due else 0.0)

    def _pay(self, earned_s: float) -> float:
        """Pay the debt from earned and saved seconds; return what is left of the earned ones, with a credit's part."""
        paid_s = min(max(self._debt_s, -earned_s), earned_s)
        owed_s = max(self._debt_s - paid_s, 0.0)
        of_decoding = min(owed_s, self._decoding_s)
        of_prompts = min(owed_s - of_decoding, self._prompt_s)
        self._decoding_s, self._prompt_s = self._decoding_s - of_decoding, self._prompt_s - of_prompts
        self._debt_s -= paid_s + of_decoding + of_prompts
        return earned_s - paid_s

    def spend(self, seconds: float) -> None:
        """Note that rows of prompts in the background are expected to take these seconds of the next step."""
        if seconds:
            self._prompt_s, self._num_steps = max(self._prompt_s - seconds * self._prompts.value, 0.0), 0

    def learn(self, expected: ExpectedStep, seconds: float) -> None:
        """Learn from the seconds of a step with others."""
        base_s = self._base * expected.base_s
        planned_s = self._decoding.value * expected.added_s + self._prompts.value * expected.prompt_s
        debt_s = self._debt_s + min(seconds, MOST_COUNTED * base_s) - base_s - planned_s
        self._debt_s = min(max(debt_s, -MOST_DEBT * base_s), MOST_DEBT * base_s)
        if expected.prompt_s:
            took_s = seconds - base_s - self._decoding.value * expected.added_s
            self._prompts.learn(min(took_s, MOST_LONGER * base_s), expected.prompt_s)
        elif expected.added_s:
            self._decoding.learn(min(seconds - base_s, MOST_ERROR * base_s), expected.added_s)
        elif expected.is_second:
            self._plain.append(seconds / expected.base_s)
            self._base = median(self._plain)
