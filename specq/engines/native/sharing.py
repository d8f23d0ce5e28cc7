"""Whether a forward pass of few rows is shared with the helper threads: whichever of alone and shared was measured to
be faster.

A helper that another process keeps waiting with work in hand costs such a pass more than it gives; that process may be
another one of ours, a client, or a machine's that shares these cores, and may come and go. So each kind of pass is
timed both ways.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

FADE = 1 / 16  # of a mean, with each pass
TRIAL = 4  # passes the other way; one, where that takes longer by the factor of SLOWER
FIRST, LEAST, MOST = 12, 64, 1024  # passes until a trial: the first, then; doubled after each that is lost
MARGIN = 0.97  # a trial that takes less than this part of the way in use wins
SLOWER = 1.25  # evidently; where the way in use does so beside when it was last compared, it is compared again
MOST_KINDS = 256


@dataclass(slots=True)
class _Kind:
    """One kind of pass.

    shares   the way in use
    mean_s   of passes in the way in use; settled_s: the mean when it was last compared; trial_s: the sum of a trial's
             passes
    left     passes until the next trial; tried: passes of the present one, if one is under way
    """

    shares: bool = True
    mean_s: float = 0.0
    settled_s: float = 0.0
    interval: int = LEAST
    left: int = FIRST
    tried: int = 0
    trial_s: float = 0.0

    def note(self, seconds: float) -> None:
        if self.left:
            self._note_used(seconds)
        else:
            self._note_tried(seconds)

    def _note_used(self, seconds: float) -> None:
        self.mean_s += (seconds - self.mean_s) * (FADE if self.mean_s else 1.0)
        self.left -= 1
        if self.mean_s > SLOWER * self.settled_s > 0:
            self.settled_s = self.mean_s
            self.interval, self.left = LEAST, 0

    def _note_tried(self, seconds: float) -> None:
        self.tried, self.trial_s = self.tried + 1, self.trial_s + seconds
        is_evident = self.tried == 1 and seconds > SLOWER * self.mean_s
        if self.tried < TRIAL and not is_evident:
            return
        mean_s, self.tried, self.trial_s = self.trial_s / self.tried, 0, 0.0
        if mean_s < MARGIN * self.mean_s:
            self.shares, self.mean_s, self.interval = not self.shares, mean_s, LEAST
        else:
            self.interval = min(2 * self.interval, MOST)
        self.settled_s, self.left = self.mean_s, self.interval


class Sharing:
    """Chooses for each pass; `kind` is whatever passes of about the same work have in common."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def should_share(self, kind: Hashable) -> bool:
        """Return whether the next pass of this kind is to be shared."""
        known = self._kinds.get(kind)
        return known is None or known.shares != (known.left == 0)

    def note(self, kind: Hashable, seconds: float) -> None:
        """Take in how long a pass took that went as it was to go."""
        if kind not in self._kinds and len(self._kinds) == MOST_KINDS:
            self._kinds.clear()
        self._kinds.setdefault(kind, _Kind()).note(seconds)
