"""The seconds of a step as a function of its rows: measured at start-up, interpolated between, and corrected by what
the steps of the service say (`specq.verifier.models.step_time`).

Beyond the largest size that was measured the curve is a line, whose slope is learned from such steps. A curve that
falls would make the scheduler add rows to save time, so times never decrease: a size counts with the least time that it
or a larger one took, since what disturbs a measurement only ever adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np

from specq.engines import Engine
from specq.protocol import Float64Array, IntpArray

PROFILED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SLOPE_ROWS = 8
SLOPE_FADE, MOST_SLOPE = 0.1, 4.0  # of what was learned; times the mean row that was measured


def profiled_rows(jumps: Sequence[int], most: int) -> list[int]:
    """Return the numbers of rows, at most so many, of which steps are to be measured, given the `jumps` of an
    engine."""
    last = min(PROFILED_ROWS[-1], most)
    beside = (rows + more for rows in jumps for more in (0, 1))
    return sorted({rows for rows in (*PROFILED_ROWS, *beside) if rows <= last})


class StepCurve:
    """Seconds per step for 1 .. max_rows rows; beyond the last measured size the slope goes on, as it is learned.

    scale, extra_s, node_s   times as long as was measured that rows take; and what the step and each drafted node take
                             besides
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """`sizes` ascend; `seconds` as measured."""
        self.scale, self.extra_s, self.node_s = 1.0, 0.0, 0.0
        rows = np.arange(1, sizes[-1] + 1)
        times = np.interp(rows, sizes, np.minimum.accumulate(seconds[::-1])[::-1])
        self._times: Float64Array = times
        self._slope = float(times[-1] - times[len(times) // 2]) / max(1, len(times) - len(times) // 2 - 1)

    def __call__(self, num_rows: int, num_nodes: int = 0) -> float:
        """Return the expected seconds of a step with this many rows, so many of which are drafted nodes."""
        return self.profiled(num_rows) * self.scale + self.extra_s + num_nodes * self.node_s

    def corrected(self, scale: float, extra_s: float, node_s: float) -> Self:
        """Return what steps take where the rows take so many times what was measured, and the step and each node of it
        so many seconds more."""
        found = copy(self)
        found.scale, found.extra_s, found.node_s = scale, extra_s, node_s
        return found

    def after(self, seconds: float) -> Self:
        """Return what steps take in rounds that begin so many seconds before them, as where drafts are waited for."""
        return self.corrected(self.scale, self.extra_s + seconds, self.node_s)

    def profiled(self, num_rows: int) -> float:
        """Return the seconds of so many rows alone, as they were measured."""
        if num_rows <= len(self._times):
            return float(self._times[max(num_rows, 1) - 1])
        return float(self._times[-1]) + (num_rows - len(self._times)) * self._slope

    def learn_slope(self, num_rows: int, seconds: float) -> None:
        """Learn what a row takes beyond the largest size that was measured, from a step with more rows; few more say
        little of it."""
        last, num_more = float(self._times[-1]), num_rows - len(self._times)
        if num_more > 0:
            slope = min(max(seconds - last, 0.0) / num_more, MOST_SLOPE * last / len(self._times))
            self._slope += SLOPE_FADE * min(num_more / len(self._times), 1.0) * (slope - self._slope)

    def slope(self, num_rows: int) -> float:
        """Return the expected seconds that one more node adds, as the mean over the next few."""
        return (self(num_rows + SLOPE_ROWS) - self(num_rows)) / SLOPE_ROWS + self.node_s

    def times(self, first: int, count: int) -> Float64Array:
        """Return f64[count]: the expected seconds of steps with `first` rows and 0, 1, ... drafted nodes."""
        return self.profiled_times(first, count) * self.scale + (self.extra_s + np.arange(count) * self.node_s)

    def profiled_times(self, first: int, count: int) -> Float64Array:
        """Return f64[count]: the seconds of `first`, `first` + 1, ... rows alone, as they were measured."""
        end = first + count
        if first >= 1 and end - 1 <= len(self._times):
            return self._times[first - 1 : end - 1]
        return self.profiled_at(np.arange(first, end))

    def profiled_at(self, num_rows: IntpArray) -> Float64Array:
        """Return f64[n]: the seconds of so many rows alone, i64[n], as they were measured."""
        known = len(self._times)
        beyond = np.maximum(num_rows - known, 0) * self._slope
        found: Float64Array = self._times[np.clip(num_rows, 1, known) - 1] + beyond
        return found


def step_curves(engine: Engine, sizes: Sequence[int]) -> tuple[StepCurve, StepCurve]:
    """Measure steps of so many rows: those in which no thread on another core takes part, and those of the engine as it
    is."""
    times = engine.step_times(sizes)
    curve = unhelped = StepCurve(sizes[: len(times)], times)
    if engine.is_helped:
        engine.is_helped = False
        times = engine.step_times(sizes)
        unhelped, engine.is_helped = StepCurve(sizes[: len(times)], times), True
    return unhelped, curve
