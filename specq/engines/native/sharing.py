"""Decide by measurement whether the helper threads share a forward pass of few rows.

A pass with few rows loses time if another process delays a helper. That may be another process of specq, a client, or
another user of these cores. It may start and stop at any time. So each kind of pass is timed both ways.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

FADE = 1 / 16  # weight of each pass in the mean
TRIAL = 4  # passes of a trial; one, if that pass is slower by the factor SLOWER
FIRST, LEAST, MOST = 12, 64, 1024  # passes until the first trial, then between trials
COST = 1 / 200  # part of the time that lost trials may take: the more a trial lost, the later is the next one
MARGIN = 0.97  # a trial wins if it takes less than this part of the current way
SLOWER = 1.25  # clearly slower; if the current way becomes slower by this factor, it is compared again
MOST_KINDS = 256


@dataclass(slots=True)
class _Kind:
    """One kind of pass.

    - shares: the current way.
    - mean_s: mean time of passes in the current way.
    - settled_s: that mean at the last comparison.
    - left: passes until the next trial.
    - tried: passes of the trial in progress.
    - trial_s: total time of the trial's passes.
    """

    shares: bool = True
    mean_s: float = 0.0
    settled_s: float = 0.0
    left: int = FIRST
    tried: int = 0
    trial_s: float = 0.0

    def note(self, seconds: float) -> None:
        if self.left:
            self._note_used(seconds)
        else:
            self._note_tried(seconds)

    def _note_used(self, seconds: float) -> None:
        # The first pass reads the weights from the disk, so the first passes have equal weights.
        self.mean_s += (seconds - self.mean_s) * (FADE if self.settled_s else 1 / (FIRST + 1 - self.left))
        self.left -= 1
        if self.mean_s > SLOWER * self.settled_s > 0:
            self.settled_s, self.left = self.mean_s, 0

    def _note_tried(self, seconds: float) -> None:
        self.tried, self.trial_s = self.tried + 1, self.trial_s + seconds
        is_evident = self.tried == 1 and seconds > SLOWER * self.mean_s
        if self.tried < TRIAL and not is_evident:
            return
        mean_s, lost_s = self.trial_s / self.tried, self.trial_s - self.tried * self.mean_s
        self.left = max(LEAST, min(int(lost_s / (COST * self.mean_s)), MOST))
        if mean_s < MARGIN * self.mean_s:
            self.shares, self.mean_s = not self.shares, mean_s
        self.settled_s, self.tried, self.trial_s = self.mean_s, 0, 0.0


class Sharing:
    """Chooses for each pass; `kind` is what passes of similar work have in common."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def should_share(self, kind: Hashable) -> bool:
        """Return whether the next pass of this kind is to be shared."""
        known = self._kinds.get(kind)
        return known is None or known.shares != (known.left == 0)

    def note(self, kind: Hashable, seconds: float) -> None:
        """Record the time of a pass that ran as `should_share` returned."""
        if kind not in self._kinds and len(self._kinds) == MOST_KINDS:
            self._kinds.clear()
        self._kinds.setdefault(kind, _Kind()).note(seconds)
