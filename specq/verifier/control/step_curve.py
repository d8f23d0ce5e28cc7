"""How long a step takes, as a function of its rows: measured at start-up, interpolated between, corrected in service.

Beyond the largest size that was measured the curve is a line, whose slope is learned from such steps.

Time that the rows do not explain (long contexts, routing, book-keeping, a busy machine) is learned from the steps as
they run, and added to each. It makes a step slower, and thus one more row relatively cheaper. What a drafted node costs
beyond its row (its share of a long context, judging, grafting) must not count among that, or drafting would look the
cheaper, the dearer it is. It is learned from drafted steps that follow plain ones of as many sessions; where there are
no plain steps, nothing is known of it.

A curve that falls would make the scheduler add rows to save time, so times never decrease: a size counts with the least
time that it or a larger one took, since what disturbs a measurement only ever adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np

from specq.engines import Engine
from specq.protocol import Float64Array

PROFILED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SLOPE_ROWS = 8
EXTRA_FADE = 0.1
FRESH_STEPS = 50  # after which what a plain step took says nothing about a drafted one, and the other way round
NODE_FADE = 0.002  # of what a node costs, in each plain step, where none was verified for long: so it is tried again
MOST_EXTRA = 4.0  # times the profiled seconds, of a step or of a row


def profiled_rows(jumps: Sequence[int], most: int) -> list[int]:
    """Return the numbers of rows, at most so many, of which steps are to be measured, given the `jumps` of an
    engine."""
    last = min(PROFILED_ROWS[-1], most)
    beside = (rows + more for rows in jumps for more in (0, 1))
    return sorted({rows for rows in (*PROFILED_ROWS, *beside) if rows <= last})


class StepCurve:
    """Seconds per step for 1 .. max_rows rows; beyond the last measured size the slope goes on, as it is learned."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """`sizes` ascend; `seconds` as measured."""
        self.extra_s = self.node_s = 0.0
        self._plain_rows = 0  # of the last plain step
        self._since_plain = self._since_nodes = FRESH_STEPS
        rows = np.arange(1, sizes[-1] + 1)
        times = np.interp(rows, sizes, np.minimum.accumulate(seconds[::-1])[::-1])
        self._times: Float64Array = times
        self._slope = float(times[-1] - times[len(times) // 2]) / max(1, len(times) - len(times) // 2 - 1)

    def __call__(self, num_rows: int, num_nodes: int = 0) -> float:
        """Return the expected seconds of a step with this many rows, so many of which are drafted nodes."""
        return self.profiled(num_rows) + self.extra_s + num_nodes * self.node_s

    def after(self, seconds: float) -> Self:
        """Return what steps take in rounds that begin so many seconds before them, as where drafts are waited for."""
        found = copy(self)
        found.extra_s += seconds
        return found

    def profiled(self, num_rows: int) -> float:
        """Return the seconds of so many rows alone, as they were measured."""
        if num_rows <= len(self._times):
            return float(self._times[max(num_rows, 1) - 1])
        return float(self._times[-1]) + (num_rows - len(self._times)) * self._slope

    def learn(self, num_rows: int, seconds: float, num_nodes: int = 0) -> None:
        """Learn from the seconds of a step with this many rows, up to the start of the next; outliers are cut."""
        seconds -= num_nodes * self.node_s
        if num_rows > len(self._times):
            self.learn_slope(num_rows, seconds)
            return
        profiled = self.profiled(num_rows)
        error = min(max(seconds - profiled, 0.0), MOST_EXTRA * profiled) - self.extra_s
        if num_nodes and self._is_fresh(num_rows - num_nodes):
            node_s = self.node_s + EXTRA_FADE * error / num_nodes
            self.node_s = min(max(node_s, 0.0), MOST_EXTRA * profiled / num_rows)
        else:
            self.extra_s += EXTRA_FADE * error
        self._count(num_rows, num_nodes)

    def _is_fresh(self, plain_rows: int) -> bool:
        """Return whether a plain step of about so many rows was seen just now."""
        return self._since_plain < FRESH_STEPS and abs(plain_rows - self._plain_rows) <= plain_rows // 4

    def _count(self, num_rows: int, num_nodes: int) -> None:
        if num_nodes:
            self._since_plain, self._since_nodes = self._since_plain + 1, 0
            return
        self._plain_rows, self._since_plain, self._since_nodes = num_rows, 0, self._since_nodes + 1
        if self._since_nodes > FRESH_STEPS:
            self.node_s *= 1 - NODE_FADE

    def learn_slope(self, num_rows: int, seconds: float) -> None:
        """Learn what a row takes beyond the largest size that was measured, from a step with more rows; few more say
        little of it."""
        last, num_more = float(self._times[-1]), num_rows - len(self._times)
        if num_more > 0:
            slope = min(max(seconds - self.extra_s - last, 0.0) / num_more, MOST_EXTRA * last / len(self._times))
            self._slope += EXTRA_FADE * min(num_more / len(self._times), 1.0) * (slope - self._slope)

    def slope(self, num_rows: int) -> float:
        """Return the expected seconds that one more node adds, as the mean over the next few."""
        return (self(num_rows + SLOPE_ROWS) - self(num_rows)) / SLOPE_ROWS + self.node_s

    def times(self, first: int, count: int) -> Float64Array:
        """Return f64[count]: the expected seconds of steps with `first` rows and 0, 1, ... drafted nodes."""
        return self.profiled_times(first, count) + (self.extra_s + np.arange(count) * self.node_s)

    def profiled_times(self, first: int, count: int) -> Float64Array:
        """Return f64[count]: the seconds of `first`, `first` + 1, ... rows alone, as they were measured."""
        end, known = first + count, len(self._times)
        if first >= 1 and end - 1 <= known:
            return self._times[first - 1 : end - 1]
        rows = np.arange(first, end)
        beyond: Float64Array = self._times[np.clip(rows, 1, known) - 1] + np.maximum(rows - known, 0) * self._slope
        return beyond


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
