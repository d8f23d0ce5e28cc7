"""Whether drafts are right as often as they were when other sets of sources were compared with the one in use.

Texts change: greedy jobs give way to sampled ones, code to prose. Then what trials have said of other arms says nothing more. What shows it is the number of
tokens that a session's round gives, which depends neither on the machine's speed nor on how many sessions there are. Where nobody drafts it is one
whatever the texts are, so only trials find out that drafts have become better.

No clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specq.verifier.window import Window

FADE = 0.1  # of what is usual, with each window
LEAST_FALL, DEVIATIONS = 0.15, 3.0  # of the logarithm of the tokens of a round; and of that in standard deviations


@dataclass(slots=True)
class Traffic:
    """`usual`: the logarithm of the tokens of a session's round while one arm is in use; None: not known yet."""

    usual: float | None = None

    def has_worsened(self, window: Window) -> bool:
        """Take in a window of the arm in use; return whether its rounds gave evidently fewer tokens than was usual. What they give is usual from then
        on."""
        if not window.verdicts or not window.tokens:
            return False
        now = math.log(window.tokens / window.verdicts)
        if self.usual is None or now < self.usual - max(LEAST_FALL, DEVIATIONS * window.deviation_of_tokens):
            is_worse, self.usual = self.usual is not None, now
            return is_worse
        self.usual += FADE * (now - self.usual)
        return False
