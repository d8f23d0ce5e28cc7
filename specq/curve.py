"""How long a step takes, as a function of its rows: measured at start-up, interpolated between.

A curve that falls would make the scheduler add rows to save time, so noise is smoothed away: times never decrease.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SLOPE_ROWS = 8


class StepCurve:
    """Seconds per step for 1 .. max_rows rows; beyond the last measured size the last slope goes on."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], overhead: float = 0.0) -> None:
        """`sizes` ascend; `overhead` is what a step costs besides the engine (routing, book-keeping), in seconds."""
        self.sizes, self.measured = tuple(sizes), tuple(seconds)
        rows = np.arange(1, sizes[-1] + 1)
        times = np.interp(rows, sizes, np.maximum.accumulate(seconds)) + overhead
        self._times: npt.NDArray[np.float64] = times
        self._slope = float(times[-1] - times[len(times) // 2]) / max(1, len(times) - len(times) // 2 - 1)

    def __call__(self, num_rows: int) -> float:
        """Return the expected seconds of a step with so many rows."""
        if num_rows <= len(self._times):
            return float(self._times[max(num_rows, 1) - 1])
        return float(self._times[-1]) + (num_rows - len(self._times)) * self._slope

    def slope(self, num_rows: int) -> float:
        """Return the expected seconds that one more row adds, as the mean over the next few."""
        return (self(num_rows + SLOPE_ROWS) - self(num_rows)) / SLOPE_ROWS

    def times(self, first: int, count: int) -> npt.NDArray[np.float64]:
        """Return f64[count]: the expected seconds of steps with first, first + 1, ... rows."""
        if first >= 1 and first + count - 1 <= len(self._times):
            return self._times[first - 1 : first - 1 + count]
        return np.array([self(first + i) for i in range(count)])
