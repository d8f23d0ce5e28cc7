"""What a step takes by its rows, with help from other cores and without, measured in turn.

Rule: the two are compared with each other, so they are measured in the same minute, step by step. The curves of a
verifier's start are not: they may be recalled from an earlier start, one from a quiet hour and the other from a busy
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specq.doctor.hardware import helped, step_times, typical
from specq.engines import Engine
from specq.verifier import StepCurve

TIMED_ROWS = (1, 2, 4, 8, 16, 32)  # of one session: its prompt is computed once
TURNS = 4
MOST_ROWS = 512  # up to which they are compared

Times = Mapping[int, Sequence[float]]  # rows -> seconds


def curves_in_turn(engine: Engine) -> tuple[StepCurve, StepCurve]:
    """Return the curves of steps without help and with it, of an engine that has help."""
    times: dict[bool, dict[int, list[float]]] = {mode: {rows: [] for rows in TIMED_ROWS} for mode in (False, True)}
    for _ in range(TURNS):
        for rows in TIMED_ROWS:
            for mode, found in times.items():
                with helped(engine, mode):
                    found[rows] += [ms / 1e3 for ms in step_times(engine, 1, rows, 1)]
    return comparable(times[False], times[True])


def comparable(unhelped: Times, with_help: Times) -> tuple[StepCurve, StepCurve]:
    """Return the curves of what was timed without help and with it. Fewer cores do not compute faster: where it looks
    so, somebody kept the helpers waiting, and both count as long as the slower one."""
    alone, together = (
        StepCurve(list(found), [typical(times) for times in found.values()]) for found in (unhelped, with_help)
    )
    sizes = range(1, MOST_ROWS + 1)
    return StepCurve(sizes, [max(alone(rows), together(rows)) for rows in sizes]), together
