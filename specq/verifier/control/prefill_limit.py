"""Chunked prefill, limited by time: how many prompt rows share a step with decoding sessions.

All sessions of a step get their tokens when it ends. So a long prompt delays its neighbours. While sessions decode, the
rows of prompts are limited. The step's expected time stays below `max_slowdown` times its time without them. Prompts
get the larger of two minimums in any case:

- Rows that take an eighth of the time without prompts, so that each prompt ends.
- Rows that take as long as the fixed cost of a step with prompts. Many tiny chunks would cost the others more in total.

After PLAIN_EVERY steps with prompts, one step has none. Only such a step shows how long the other sessions take while
their contexts grow. A long prompt takes at most 17 / 16 * max_slowdown / (max_slowdown - 1) times as long as alone.
That is 2.4 by default, and 7.9 if the prompt always gets the minimum.

If no session decodes, prompts take all rows. Short prompts take all rows too if they came when at most as many sessions
decoded as waited, as in a burst. They gain more than the others lose, whichever of them decode first.

A verifier sends no tokens and no heartbeats within a step. So a step with prompts is planned to take at most
`longest_s`, whether sessions decode or not, and also for short prompts. Only LEAST_ROWS rows of prompts are always
allowed. A heartbeat announces this limit to the broker.

The seconds of prompt rows beyond the step curve are learned from steps. They have three parts:

- A fixed part of each step with prompts, for example because CUDA graphs exist only for plain rows.
- A part of each row.
- A part of each token that a row attends to: rows slow down as the context grows.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import BoolArray, Float64Array, Int32Array, Int64Array, IntpArray
from specq.verification import ends_of, places_in_runs
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.step.node_choice import Shares

MAX_SLOWDOWN = 1.8
# A step may take the longer of LONGEST_S seconds and MOST_LONGER times the step without prompts and nodes, so that one
# read of the weights serves many rows. It may always have LEAST_ROWS rows of prompts.
LONGEST_S, MOST_LONGER, LEAST_ROWS = 0.5, 4.0, 16
SLOWER = 4.0  # times the expected seconds that a step may take, for a machine that other processes begin to use
LEAST = 1 / 8  # part of the step without prompts that prompts may always take
FADE = 0.97  # weight of earlier steps, with each step with prompts
OFFSET_FADE = 0.1  # weight of a new step in the offset
# Ridge of the costs of a step, of a row and of a token attended to, as a part of their squares. Where several costs
# explain a time equally well, a larger ridge gives a cost less of it. Rows have the largest. If rows seem too cheap,
# the next step has more of them and shows the error. If they seem too expensive, few rows teach little.
RIDGE = (0.1, 0.2, 0.1)
SWEEPS = 20
MOST_ERROR = 2.0  # a step counts as at most this many times longer or shorter than expected
LEAST_ROW = 0.5  # part of a row's seconds by the curve that it takes at least
# One of TRIAL_EVERY steps with the minimum of rows has twice as many. Else the seconds of rows cannot be separated from
# the fixed cost of a step.
TRIAL_EVERY = 4
# After PLAIN_EVERY steps with prompts, one step without them shows the seconds of the others while their contexts grow.
PLAIN_EVERY = 16

Chunks = tuple[Int32Array, IntpArray]  # starts of parts of prompts, i32[n], and their numbers of rows, i64[n]


class PrefillLimit:
    """The limit on rows of prompts, and the costs that it learns. With a `max_slowdown` of 0 time is not limited."""

    def __init__(self, max_slowdown: float = MAX_SLOWDOWN) -> None:
        self.max_slowdown = max_slowdown
        self._num_mixed = 0  # steps with prompts since the last step without
        self._offset_s = 0.0  # seconds beyond the curve, of steps launched before the last one was collected
        self._costs = np.zeros(3)  # seconds of a step with prompts, of a row, of a token that a row attends to
        self._seen, self._right = np.zeros((3, 3)), np.zeros(3)  # normal equations of weighted least squares

    # --- planning ---------------------------------------------------------------------------------------------------

    def sizes(
        self, chunks: Chunks, is_free: BoolArray, num_decoding: int, room: int, curve: StepCurve, *, is_late: bool
    ) -> IntpArray:
        """Return i64[n]: the rows of each of n prompts, in order of precedence; rarely all 0.

        chunks         what is left of each prompt.
        is_free        bool[n]: prompts that may take all rows.
        num_decoding   sessions that decode in the step.
        room           rows for all prompts together, at least 1.
        is_late        whether the step is launched before the one before is collected.
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
        """Return how many rows of prompts, in order of precedence, keep a step within `longest_s`.

        The arguments are as for `sizes`.
        """
        without, added = self._added(chunks, num_decoding, room, curve, is_late=is_late)
        return min(max(int(np.searchsorted(without + added, longest_s(without), "right")), LEAST_ROWS), room)

    @property
    def fixed_s(self) -> float:
        """The seconds that a step with prompts takes longer than by its rows."""
        return float(self._costs[0])

    def within(
        self, chunks: Chunks, num_decoding: int, room: int, curve: StepCurve, seconds: float, *, is_late: bool
    ) -> tuple[int, float]:
        """Return how many rows of prompts, in order of precedence, add at most `seconds`, and what they add.

        Other arguments as for `sizes`.
        """
        _, added = self._added(chunks, num_decoding, room, curve, is_late=is_late)
        num_rows = int(np.searchsorted(added, seconds, "right"))
        return num_rows, float(added[num_rows - 1]) if num_rows else 0.0

    def _added(
        self, chunks: Chunks, num_decoding: int, room: int, curve: StepCurve, *, is_late: bool
    ) -> tuple[float, Float64Array]:
        """Return the seconds of a step without prompts, and f64[rows]: what 1, 2, ... rows of prompts add to it."""
        starts, pending = chunks
        attended = np.cumsum(_attended((starts, filled(pending, room))))  # [rows]
        without = self._without(num_decoding, 0, curve, is_late=is_late)
        return without, self._seconds(_by_curve(num_decoding, len(attended), without, curve), attended)

    def parts_s(self, num_rows: int, curve: StepCurve) -> tuple[float, float]:
        """Return the fixed seconds of a step with prompts, and the seconds that `num_rows` rows add to it."""
        as_such = curve(1)
        return as_such + float(self._costs[0]), curve(num_rows) - as_such

    def _most(
        self,
        free: Chunks,
        limited: Chunks,
        num_decoding: int,
        room: int,
        curve: StepCurve,
        is_late: bool,
    ) -> int:
        """Return how many rows of limited prompts join a step that already has the rows of free prompts."""
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
        """Return f64[n]: the seconds that 1, 2, ... n rows of prompts add to a step.

        by_curve   f64[n]: their seconds by the curve.
        attended   i64[n]: the tokens that they attend to together.
        """
        step_s, row_s, attended_s = self._costs
        rows = np.maximum(by_curve + row_s * np.arange(1, len(attended) + 1), LEAST_ROW * by_curve)
        return np.maximum.accumulate(step_s + rows + attended_s * attended)

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn(self, shares: Shares, num_rows: int, seconds: float, curve: StepCurve, *, is_late: bool) -> None:
        """Learn from the seconds of a step with `num_rows` rows, up to the start of the next step."""
        num_nodes, (num_prefill, _) = len(shares.nodes), shares.prompts
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
        """Fit the costs to steps with prompts by their relative errors; recent steps weigh more."""
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
    """Return the longest seconds that a step may be planned to take, given its seconds without prompts and nodes."""
    return max(LONGEST_S, MOST_LONGER * without_s)


def silent_s(curve: StepCurve, num_running: int, max_prefill_rows: int, last_s: float) -> float:
    """Return the seconds for which a verifier may be silent, because it sends no message within a step.

    SLOWER times the longer of two: the longest step that can be planned for `num_running` sessions before the next
    heartbeat, and the last step.
    """
    planned = max(longest_s(curve(num_running)), curve(num_running + LEAST_ROWS))
    return SLOWER * max(min(planned, curve(max_prefill_rows)), last_s)


def _by_curve(num_rows: int, count: int, without: float, curve: StepCurve) -> Float64Array:
    """Return f64[count]: the seconds by the curve that 1, 2, ... rows add to a step with `num_rows` others.

    If that step takes longer than was measured, e.g. because others use the machine now, the rows are scaled likewise.
    """
    times = curve.profiled_times(num_rows, count + 1)
    by_curve: Float64Array = (times[1:] - times[0]) * max(without / times[0], 1.0)
    return by_curve


def _fitted(seen: Float64Array, right: Float64Array, costs: Float64Array, least: tuple[float, ...]) -> Float64Array:
    """Return better costs, none below `least`: Gauss-Seidel sweeps over the normal equations of ridge regression."""
    costs = costs.copy()
    for _ in range(SWEEPS):
        for i, ridge in enumerate(RIDGE):
            rest = right[i] - seen[i] @ costs + seen[i, i] * costs[i]
            costs[i] = max(rest / (seen[i, i] * (1 + ridge)), least[i])
    return costs


def filled(pending: IntpArray, room: int) -> IntpArray:
    """Return i64[n]: how many rows of each prompt fit, in order of precedence."""
    filled: IntpArray = np.clip(room - ends_of(pending) + pending, 0, pending)
    return filled


UNLIMITED = PrefillLimit(0.0)


def _attended(chunks: Chunks) -> Int64Array:
    """Return i64[rows]: how many tokens each row attends to, for one part of a prompt after the other."""
    starts, sizes = chunks
    attended: Int64Array = starts.repeat(sizes) + places_in_runs(sizes) + 1
    return attended
