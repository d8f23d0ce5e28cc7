"""Chunked prefill, limited by time: how many rows of prompts share a step with sessions that decode.

All sessions of a step get their tokens when it ends, so a long prompt is felt by its neighbours. While sessions decode,
the prompts beside them get as many rows as keep the step's expected time below `max_slowdown` times that of the step
without them; at least as many as take an eighth of it, so that each prompt comes to its end, and as long as a step
takes for having prompts at all, so that crumbs of prompts do not cost the others more in the end. One step in 17 has
none, since nothing else tells what the others take with contexts that grow. Thus a long prompt takes at most 17 / 16 *
max_slowdown / (max_slowdown - 1) times as long as alone, 2.4 by default, and 7.9 where the least is all that it gets.
Where no session decodes, prompts take all rows that there are. So do short prompts that came when no more decoded than
waited, as in a burst, whichever of them decode first: they gain more than the others lose.

A verifier sends nothing within a step, neither tokens nor heartbeats. So no step with prompts is planned to take longer
than `longest_s` of the step without them says, whoever decodes and however short they are, unless LEAST_ROWS of them
do. That is what a heartbeat can promise the broker.

What rows of prompts take beyond the step curve is learned as they are computed: for the step as such (CUDA graphs that
only plain rows have), for each row, and for each token that a row attends to, since rows get dearer as the context
grows.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import BoolArray, Float64Array, Int32Array, Int64Array, IntpArray
from specq.verification import ends_of, places_in_runs
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.step.node_choice import Shares

MAX_SLOWDOWN = 1.8
# Seconds that a step may take in any case; times as long as one without prompts and nodes, so that the weights are read
# for many rows; rows of prompts that it may have in any case.
LONGEST_S, MOST_LONGER, LEAST_ROWS = 0.5, 4.0, 16
LEAST = 1 / 8  # of the step without prompts, which prompts may always take
FADE = 0.97  # of what was learned, in each step with prompts
OFFSET_FADE = 0.1
# How little the step as such, rows, and tokens attended to explain where others explain as much. Rows the least: where
# they are taken for too cheap, more of them show it in the next step, while of few rows that seem dear nothing would be
# learned.
RIDGE = (0.1, 0.2, 0.1)
SWEEPS = 20
MOST_ERROR = 2.0  # times as long, or as short, as was expected: more is not learned from one step
LEAST_ROW = 0.5  # of what a row takes by the curve, that it takes at least
# steps with prompts that have the least rows, one that has twice as many: else what these take by themselves is not
# found out
TRIAL_EVERY = 4
# steps with prompts at most, before one without tells what the others take by themselves, with contexts that grow
PLAIN_EVERY = 16

Chunks = tuple[Int32Array, IntpArray]  # where parts of prompts start, i32[n], and how many rows they have, i64[n]


class PrefillLimit:
    """See the module. max_slowdown: 0: no limit but the rows of a step."""

    def __init__(self, max_slowdown: float = MAX_SLOWDOWN) -> None:
        self.max_slowdown = max_slowdown
        self._num_mixed = 0  # steps with prompts since the last one without
        self._offset_s = 0.0  # of steps that were launched before the last one was collected, to what the curve says
        self._costs = np.zeros(3)  # seconds: of a step with prompts, of a row, of a token that a row attends to
        self._seen, self._right = np.zeros((3, 3)), np.zeros(3)  # normal equations of weighted least squares

    # --- planning ---------------------------------------------------------------------------------------------------

    def sizes(
        self, chunks: Chunks, is_free: BoolArray, num_decoding: int, room: int, curve: StepCurve, *, is_late: bool
    ) -> IntpArray:
        """Return i64[n]: how many rows n prompts get, in order of precedence, beside sessions that decode; seldom none.

        chunks    what is left of each prompt; is_free bool[n]: those that take all rows that there are
        room      rows that prompts may take in all, 1 at least
        is_late   whether the step is launched behind another one
        """
        starts, pending = chunks
        sizes = filled(np.where(is_free, pending, 0), room)
        room -= int(sizes.sum())
        if self.max_slowdown and room and not is_free.all():
            if self._num_mixed >= PLAIN_EVERY:
                return sizes
            room = self._most(
                (starts, sizes), (starts[~is_free], pending[~is_free]), num_decoding, room, curve, is_late
            )
        return sizes + filled(np.where(is_free, 0, pending), room)

    def most_rows(self, chunks: Chunks, num_decoding: int, room: int, curve: StepCurve, *, is_late: bool) -> int:
        """Return how many rows of prompts, in order of precedence, keep a step within `longest_s`; arguments as of
        `sizes`."""
        starts, pending = chunks
        attended = np.cumsum(_attended((starts, filled(pending, room))))  # [rows]
        without = self._without(num_decoding, 0, curve, is_late=is_late)
        seconds = without + self._seconds(_by_curve(num_decoding, len(attended), without, curve), attended)
        return min(max(int(np.searchsorted(seconds, longest_s(without), "right")), LEAST_ROWS), room)

    def parts_s(self, num_rows: int, curve: StepCurve) -> tuple[float, float]:
        """Return the expected seconds of a step with prompts as such, and what so many rows add to it."""
        as_such = curve(1)
        return as_such + float(self._costs[0]), curve(num_rows) - as_such

    def prompts_s(self, chunks: Chunks, num_decoding: int, curve: StepCurve, *, is_late: bool) -> float:
        """Return the seconds that parts of prompts are expected to add to a step of sessions that decode, without
        nodes."""
        attended = np.cumsum(_attended(chunks))
        without = self._without(num_decoding, 0, curve, is_late=is_late)
        return float(self._seconds(_by_curve(num_decoding, len(attended), without, curve), attended)[-1])

    def _most(
        self,
        free: Chunks,
        limited: Chunks,
        num_decoding: int,
        room: int,
        curve: StepCurve,
        is_late: bool,
    ) -> int:
        """Return how many rows of limited prompts join a step that has rows of free ones already."""
        starts, pending = limited
        limited = starts, filled(pending, room)
        attended = np.cumsum(np.concatenate([_attended(free), _attended(limited)]))  # [rows]
        without = self._without(num_decoding, 0, curve, is_late=is_late)
        seconds = self._seconds(_by_curve(num_decoding, len(attended), without, curve), attended)
        num_free = int(free[1].sum())
        taken = seconds[num_free - 1] if num_free else self._costs[0]
        least = np.searchsorted(seconds[num_free:] - taken, max(LEAST * without, self._costs[0])) + 1
        most = np.searchsorted(seconds[num_free:], (self.max_slowdown - 1) * without, "right")
        if most < least and self._num_mixed % TRIAL_EVERY == TRIAL_EVERY - 1:
            least *= 2
        return min(max(int(least), int(most)), room)

    def _without(self, num_rows: int, num_nodes: int, curve: StepCurve, *, is_late: bool) -> float:
        """Return the expected seconds of a step without prompts."""
        expected = curve(num_rows, num_nodes)
        return max(expected + self._offset_s * is_late, LEAST * expected)

    def _seconds(self, by_curve: Float64Array, attended: Int64Array) -> Float64Array:
        """Return f64[n]: what 1, 2, ... n rows of prompts add to a step; they attend to so many tokens together."""
        step_s, row_s, attended_s = self._costs
        rows = np.maximum(by_curve + row_s * np.arange(1, len(attended) + 1), LEAST_ROW * by_curve)
        return np.maximum.accumulate(step_s + rows + attended_s * attended)

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn(self, shares: Shares, num_rows: int, seconds: float, curve: StepCurve, *, is_late: bool) -> None:
        """Learn from the seconds of a step with so many rows, up to the start of the next."""
        num_nodes, (num_prefill, _) = len(shares.nodes), shares.prompts()
        self._num_mixed = self._num_mixed + 1 if num_prefill else 0
        if num_prefill:
            chunks = shares.prompt_chunks()
            self._learn_prompts(chunks, num_rows - num_prefill, num_nodes, seconds, curve, is_late=is_late)
        elif is_late:
            expected = curve(num_rows, num_nodes)
            error = min(max(seconds - expected, -expected), MOST_ERROR * expected) - self._offset_s
            self._offset_s += OFFSET_FADE * error

    def _learn_prompts(
        self, chunks: Chunks, num_rows: int, num_nodes: int, seconds: float, curve: StepCurve, *, is_late: bool
    ) -> None:
        """Fit the costs to steps with prompts, the last ones first, each by its relative error."""
        attended = np.cumsum(_attended(chunks))
        without = self._without(num_rows, num_nodes, curve, is_late=is_late)
        of_rows = _by_curve(num_rows, len(attended), without, curve)
        by_curve, expected = float(of_rows[-1]), without + float(self._seconds(of_rows, attended)[-1])
        explained = min(max(seconds, expected / MOST_ERROR), MOST_ERROR * expected) - without - by_curve
        step = np.array([1.0, len(attended), attended[-1]]) / expected  # [costs]
        self._seen = FADE * self._seen + np.outer(step, step)
        self._right = FADE * self._right + step * explained / expected
        least = 0.0, -(1 - LEAST_ROW) * by_curve / len(attended), 0.0
        self._costs = _fitted(self._seen, self._right, self._costs, least)


def longest_s(without_s: float) -> float:
    """Return how long a step may be planned to take that takes so many seconds without prompts and nodes."""
    return max(LONGEST_S, MOST_LONGER * without_s)


def _by_curve(num_rows: int, count: int, without: float, curve: StepCurve) -> Float64Array:
    """Return f64[count]: what 1, 2, ... rows add to a step with so many others by the curve. Where that step takes
    longer than was measured, as on a machine that others use by now, so do they."""
    times = curve.profiled_times(num_rows, count + 1)
    by_curve: Float64Array = (times[1:] - times[0]) * max(without / times[0], 1.0)
    return by_curve


def _fitted(seen: Float64Array, right: Float64Array, costs: Float64Array, least: tuple[float, ...]) -> Float64Array:
    """Return better costs, each at least so much: Gauss-Seidel sweeps over the normal equations of ridge regression."""
    costs = costs.copy()
    for _ in range(SWEEPS):
        for i, ridge in enumerate(RIDGE):
            rest = right[i] - seen[i] @ costs + seen[i, i] * costs[i]
            costs[i] = max(rest / (seen[i, i] * (1 + ridge)), least[i])
    return costs


def filled(pending: IntpArray, room: int) -> IntpArray:
    """Return how many rows of each prompt find room, in order of precedence."""
    filled: IntpArray = np.clip(room - ends_of(pending) + pending, 0, pending)
    return filled


UNLIMITED = PrefillLimit(0.0)


def _attended(chunks: Chunks) -> Int64Array:
    """Return to how many tokens each row of parts of prompts attends, of one part after the other."""
    starts, sizes = chunks
    attended: Int64Array = starts.repeat(sizes) + places_in_runs(sizes) + 1
    return attended
