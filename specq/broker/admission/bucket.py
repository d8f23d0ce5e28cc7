"""The token bucket by which limits are kept; time is an argument."""

from __future__ import annotations


class Bucket:
    """A token bucket, full at first: `rate` flows in each second, `burst` is what it holds."""

    __slots__ = ("_at", "_level")

    def __init__(self, burst: float, now: float) -> None:
        self._level, self._at = burst, now

    def take(self, cost: float, rate: float, burst: float, now: float) -> bool:
        """Take out what something costs, at most all that it can hold; False if there is not enough."""
        level = self._level
        if now > self._at:
            level = min(burst, level + rate * (now - self._at))
            self._at = now
        is_enough = level >= cost or level >= burst
        self._level = level - cost if is_enough else level
        return is_enough

    def charge(self, cost: float) -> None:
        """Take out what was spent, also beyond what there is."""
        self._level -= cost
