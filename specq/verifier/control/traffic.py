"""Whether drafts are right as often as they were when other sets of sources were compared with the one in use.

Texts change: greedy jobs give way to sampled ones, code to prose. Then what trials have said of other arms says nothing
more. What shows it is the number of tokens that a session's round gives, which depends neither on the machine's speed
nor on how many sessions there are. Where nobody drafts it is one whatever the texts are, so only trials find out that
drafts have become better.

No clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specq.verifier.control.window import Window

FADE = 0.1  # of what is usual, with each window
FIRST_SPREAD = 0.2  # between windows, as a logarithm, as it is believed before they show it
LEAST_FALL, DEVIATIONS = 0.15, 4.0  # of the logarithm of the tokens of a round; and of that in standard deviations


@dataclass(slots=True)
class Traffic:
    """`usual`: the logarithm of the tokens of a session's round while one arm is in use; None: not known yet.
    `variance`: of that between windows, which is more than their steps show, since one text is easier than another."""

    usual: float | None = None
    variance: float = FIRST_SPREAD**2

    def fall(self, window: Window) -> float:
        """Take in a window of the arm in use; return by how much less its rounds gave than was usual, as a logarithm,
        if that is evident, else 0. What they give is usual from then on."""
        if not window.decoded:
            return 0.0
        now = math.log(window.decoded / window.verdicts)
        if self.usual is None:
            self.usual = now
            return 0.0
        off, deviation = now - self.usual, max(window.deviation_of_tokens, math.sqrt(self.variance))
        is_worse = off < -max(LEAST_FALL, DEVIATIONS * deviation)
        self.variance += FADE * (off**2 - self.variance)
        self.usual += off if is_worse else FADE * off
        return -off if is_worse else 0.0
