"""How long hardware takes as a function of its load: measured points, straight lines between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Points = Sequence[Sequence[float]]  # [[load, milliseconds], ...], loads ascending


class HardwareCurve:
    """Seconds for a load; below the first point its time, beyond the last point the last line goes on."""

    def __init__(self, points: Points) -> None:
        self._loads = [load for load, _ in points]
        self._seconds = [milliseconds / 1000 for _, milliseconds in points]

    def __call__(self, load: float) -> float:
        loads, seconds = self._loads, self._seconds
        if load <= loads[0] or len(loads) == 1:
            return seconds[0]
        i = min(bisect_right(loads, load), len(loads) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (loads[i] - loads[i - 1])
        return max(seconds[i - 1] + slope * (load - loads[i - 1]), 0.0)
