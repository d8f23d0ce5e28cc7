"""The token bucket by which limits are kept; time is an argument."""

from __future__ import annotations


class Bucket:
    """A token bucket, full at first: `rate` flows in each second, `burst` is what it holds."""

    __slots__ = ("_at", "_level")

    def __init__(self, burst: float, now: float) -> None:
        self._level, self._at = burst, now

    def take(self, cost: float, rate: float, burst: float, now: float) -> bool:
        """Take out what something costs, at most all that it can hold; False if there is not enough."""
        self._fill(rate, burst, now)
        is_enough = self._level >= cost or self._level >= burst
        self._level -= cost if is_enough else 0.0
        return is_enough

    def spend(self, cost: float, rate: float, burst: float, now: float) -> bool:
        """Take out what something costs, however much; False if nothing is left. So the answer does not depend on the
        cost."""
        self._fill(rate, burst, now)
        if self._level <= 0:
            return False
        self._level -= cost
        return True

    def _fill(self, rate: float, burst: float, now: float) -> None:
        if now > self._at:
            self._level = min(burst, self._level + rate * (now - self._at))
            self._at = now

    def charge(self, cost: float) -> None:
        """Take out what was spent, also beyond what there is."""
        self._level -= cost
