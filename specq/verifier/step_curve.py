"""How long a step takes, as a function of its rows: measured at start-up, interpolated between, corrected in service.

Beyond the largest size that was measured the curve is a line, whose slope is learned from such steps.

Time that the rows do not explain (long contexts, routing, book-keeping, a busy machine) is learned from the steps as they run,
and added to each. It makes a step slower, and thus one more row relatively cheaper.

A curve that falls would make the scheduler add rows to save time, so times never decrease: a size counts with the least time that it or a
larger one took, since what disturbs a measurement only ever adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.protocol import Float64Array

SLOPE_ROWS = 8
EXTRA_FADE = 0.1
MOST_EXTRA = 4.0  # times the profiled seconds, of a step or of a row


class StepCurve:
    """Seconds per step for 1 .. max_rows rows; beyond the last measured size the slope goes on, as it is learned."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """`sizes` ascend; `seconds` as measured."""
        self.extra_s = 0.0
        rows = np.arange(1, sizes[-1] + 1)
        times = np.interp(rows, sizes, np.minimum.accumulate(seconds[::-1])[::-1])
        self._times: Float64Array = times
        self._slope = float(times[-1] - times[len(times) // 2]) / max(1, len(times) - len(times) // 2 - 1)

    def __call__(self, num_rows: int) -> float:
        """Return the expected seconds of a step with this many rows."""
        return self._profiled(num_rows) + self.extra_s

    def _profiled(self, num_rows: int) -> float:
        if num_rows <= len(self._times):
            return float(self._times[max(num_rows, 1) - 1])
        return float(self._times[-1]) + (num_rows - len(self._times)) * self._slope

    def learn(self, num_rows: int, seconds: float) -> None:
        """Learn from the seconds of a step with this many rows, up to the start of the next; outliers are cut."""
        if num_rows > len(self._times):
            self._learn_slope(num_rows - len(self._times), seconds)
            return
        profiled = self._profiled(num_rows)
        extra = min(max(seconds - profiled, 0.0), MOST_EXTRA * profiled)
        self.extra_s += EXTRA_FADE * (extra - self.extra_s)

    def _learn_slope(self, num_more: int, seconds: float) -> None:
        """Learn from a step with so many more rows than were measured: few more say little of what one costs."""
        last = float(self._times[-1])
        slope = min(max(seconds - self.extra_s - last, 0.0) / num_more, MOST_EXTRA * last / len(self._times))
        self._slope += EXTRA_FADE * min(num_more / len(self._times), 1.0) * (slope - self._slope)

    def slope(self, num_rows: int) -> float:
        """Return the expected seconds that one more row adds, as the mean over the next few."""
        return (self(num_rows + SLOPE_ROWS) - self(num_rows)) / SLOPE_ROWS

    def times(self, first: int, count: int) -> Float64Array:
        """Return f64[count]: the expected seconds of steps with first, first + 1, ... rows."""
        end, known = first + count, len(self._times)
        if first >= 1 and end - 1 <= known:
            return self._times[first - 1 : end - 1] + self.extra_s
        rows = np.arange(first, end)
        beyond = np.maximum(rows - known, 0) * self._slope
        return self._times[np.clip(rows, 1, known) - 1] + beyond + self.extra_s
