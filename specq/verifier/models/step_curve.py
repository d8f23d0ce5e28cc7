"""The seconds of a step as a function of its rows.

At start-up the engine says what it expects of some sizes. The curve is interpolated between them. Steps in service
correct it (`specq.verifier.models.step_time`). Beyond the largest of these sizes the curve is a line. Its slope is
learned from such steps.

Times never decrease, because a curve that falls would make the scheduler add rows to save time. Each size counts with
the least time of this size and all larger ones. A disturbance can only make a measurement longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from specq.engines import Engine, helped, keep_times
from specq.protocol import Float64Array, IntpArray

PROFILED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SLOPE_ROWS = 8
SLOPE_FADE, MOST_SLOPE = 0.1, 4.0  # weight of a new slope; highest slope, in mean measured rows


def profiled_rows(jumps: Sequence[int], most: int) -> list[int]:
    """Return the numbers of rows to measure, up to `most`: PROFILED_ROWS, and both sides of the engine's `jumps`."""
    last = min(PROFILED_ROWS[-1], most)
    beside = (rows + more for rows in jumps for more in (0, 1))
    return sorted({rows for rows in (*PROFILED_ROWS, *beside) if rows <= last})


class StepCurve:
    """The seconds of a step by its number of rows. Beyond the largest measured size the slope is learned.

    scale          factor on the measured seconds of rows.
    extra_s        additional seconds of each step.
    node_s         additional seconds of each drafted node.
    num_measured   the largest measured size.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Interpolate between `sizes` (ascending numbers of rows) with their measured `seconds`."""
        self.scale, self.extra_s, self.node_s = 1.0, 0.0, 0.0
        rows = np.arange(1, sizes[-1] + 1)
        times = np.interp(rows, sizes, np.minimum.accumulate(seconds[::-1])[::-1])
        self._times: Float64Array = times
        self.num_measured = len(times)
        self._slope = float(times[-1] - times[len(times) // 2]) / max(1, len(times) - len(times) // 2 - 1)

    def __call__(self, num_rows: int, num_nodes: int = 0) -> float:
        """Return the expected seconds of a step with `num_rows` rows, including `num_nodes` drafted nodes."""
        return self.profiled(num_rows) * self.scale + self.extra_s + num_nodes * self.node_s

    def corrected(self, scale: float, extra_s: float, node_s: float) -> Self:
        """Return a copy with these values of `scale`, `extra_s` and `node_s`."""
        found = type(self).__new__(type(self))  # faster than `copy`
        found.__dict__.update(self.__dict__)
        found.scale, found.extra_s, found.node_s = scale, extra_s, node_s
        return found

    def after(self, seconds: float) -> Self:
        """Return the curve of rounds that begin `seconds` before their step, for example to wait for drafts."""
        return self.corrected(self.scale, self.extra_s + seconds, self.node_s)

    def profiled(self, num_rows: int) -> float:
        """Return the measured seconds of `num_rows` rows, without corrections."""
        if num_rows <= len(self._times):
            return float(self._times[max(num_rows, 1) - 1])
        return float(self._times[-1]) + (num_rows - len(self._times)) * self._slope

    def learn_slope(self, num_rows: int, seconds: float) -> None:
        """Learn the slope beyond the largest measured size from a step with more rows.

        The fewer rows a step has beyond that size, the less it counts.
        """
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
        """Return f64[count]: the measured seconds of `first`, `first` + 1, ... rows, without corrections."""
        end = first + count
        if first >= 1 and end - 1 <= len(self._times):
            return self._times[first - 1 : end - 1]
        return self.profiled_at(np.arange(first, end))

    def profiled_at(self, num_rows: IntpArray) -> Float64Array:
        """Return f64[n]: the measured seconds of `num_rows` rows, i64[n], without corrections."""
        known = len(self._times)
        beyond = np.maximum(num_rows - known, 0) * self._slope
        found: Float64Array = self._times[np.clip(num_rows, 1, known) - 1] + beyond
        return found


def step_curves(engine: Engine, sizes: Sequence[int]) -> tuple[StepCurve, StepCurve]:
    """Return the expected curves of steps: without threads on other cores, and with the engine as it is."""
    times = engine.step_times(sizes)
    curve = unhelped = StepCurve(sizes[: len(times)], times)
    if engine.is_helped:
        with helped(engine, is_helped=False):
            times = engine.step_times(sizes)
            unhelped = StepCurve(sizes[: len(times)], times)
    return unhelped, curve


def keep_curve(engine: Engine, curve: StepCurve, *, is_helped: bool) -> None:
    """Let the engine keep a curve for later processes. `is_helped`: of steps with threads on other cores."""
    sizes = profiled_rows(engine.jumps, PROFILED_ROWS[-1])
    with helped(engine, is_helped=is_helped and engine.is_helped):
        keep_times(engine, {size: curve(size) for size in sizes})
