"""Sessions in the background fill what the others leave of a step.

While others decode, sessions in the background make their steps at most MOST_SLOWDOWN times as long, as a mean. Each
step with others earns that part of its expected seconds. Rows in the background spend it: a half goes to decoding rows,
the other half to rows of prompts, and what one of them does not need goes to the other.

- Decoding rows spend what one step earns. If that is less than one row, they save for one row.
- Rows of prompts save for one step in PROMPTS_EVERY. A step with prompts takes longer than others. So the other
  steps keep to MOST_SLOWDOWN. That step takes at most MOST_LONGER times as long as without them.

While a prompt of the others is computed, theirs wait. Where none of the others decodes, they wait too. Without others
nothing is limited. They have no draft nodes beside others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specq.verifier.models.step_curve import StepCurve

MOST_SLOWDOWN = 1.1  # mean factor on the seconds of the others' steps
PROMPTS_EVERY = 20  # steps with others
MOST_LONGER = 3.0  # factor on the seconds of a step with prompts in the background


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


class Background:
    """The seconds that sessions in the background have earned."""

    def __init__(self) -> None:
        self._prompt_s = self._decoding_s = 0.0
        self._num_steps = 0  # since rows of prompts spent something

    def share(self, waiting: Waiting, curve: StepCurve, fixed_s: float) -> BackgroundShare:
        """Return what they take of the next step.

        fixed_s   the fixed seconds of a step with prompts.
        """
        step_s = curve(waiting.others)
        earned_s = (MOST_SLOWDOWN - 1) * step_s
        to_prompts = earned_s * (waiting.has_prompts * (0.5 if waiting.decoding else 1.0))
        times = curve.profiled_times(waiting.others, waiting.decoding + 1) * curve.scale
        added_s = times - times[0]
        self._decoding_s += earned_s - to_prompts
        num_decoding = int(np.searchsorted(added_s, self._decoding_s, "right")) - 1
        self._decoding_s -= float(added_s[num_decoding])
        if num_decoding == waiting.decoding:
            to_prompts, self._decoding_s = to_prompts + self._decoding_s, 0.0
        else:
            self._decoding_s = min(self._decoding_s, max(float(added_s[1]), earned_s))
        most_s = max((MOST_LONGER - 1) * step_s, 2 * fixed_s)
        self._prompt_s = min(self._prompt_s + to_prompts, most_s) if waiting.has_prompts else 0.0
        self._num_steps += 1
        is_due = self._num_steps >= PROMPTS_EVERY and not waiting.behind_others
        return BackgroundShare(num_decoding, self._prompt_s if is_due else 0.0)

    def spend(self, seconds: float) -> None:
        """Note that rows of prompts in the background are expected to take these seconds of the next step."""
        if seconds:
            self._prompt_s, self._num_steps = max(self._prompt_s - seconds, 0.0), 0
