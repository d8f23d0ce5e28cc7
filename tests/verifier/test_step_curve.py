"""The seconds of a step by its rows, as they were measured: between the sizes, beyond them, and corrected."""

from __future__ import annotations

import numpy as np
import pytest

from specq.verifier import StepCurve
from specq.verifier.models.step_curve import MOST_SLOPE
from specq.verifier.step.node_choice import best_count

FIRST_S, ROW_S = 0.004, 0.0001


@pytest.fixture
def curve() -> StepCurve:
    return StepCurve([1, 64], [FIRST_S, FIRST_S + 63 * ROW_S])


def test_what_a_step_takes_besides_its_rows_is_added(curve: StepCurve) -> None:
    """What the rows take is scaled, and each node has its own; the curve that was measured stays."""
    found = curve.corrected(1.5, 0.001, 0.0002)
    assert found(24, 8) == pytest.approx(1.5 * (FIRST_S + 23 * ROW_S) + 0.001 + 8 * 0.0002)
    assert found.times(16, 9) == pytest.approx([found(16 + n, n) for n in range(9)])
    assert found.slope(16) == pytest.approx(1.5 * ROW_S + 0.0002)
    assert found.profiled(24) == curve(24) == pytest.approx(FIRST_S + 23 * ROW_S)


def test_beyond_the_largest_size_the_slope_goes_on(curve: StepCurve) -> None:
    beyond = [FIRST_S + (rows - 1) * ROW_S for rows in (64, 65, 200)]
    assert [curve(rows) for rows in (64, 65, 200)] == pytest.approx(beyond)
    assert curve.profiled_at(np.array([64, 65, 200])) == pytest.approx(beyond)
    assert curve.profiled_times(60, 10) == pytest.approx([curve.profiled(60 + n) for n in range(10)])


@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_the_slope_beyond_is_learned_from_steps_with_more_rows(curve: StepCurve, factor: float) -> None:
    """Sizes that were measured stay."""
    last = curve(64)
    for _ in range(200):
        curve.learn_slope(64 + 128, last + 128 * factor * ROW_S)
    assert curve(64 + 128) == pytest.approx(last + 128 * factor * ROW_S, rel=0.01)
    assert curve(64) == last


def test_a_few_more_rows_hardly_change_the_slope_and_none_keep_it(curve: StepCurve) -> None:
    few, many = (StepCurve([1, 64], [FIRST_S, FIRST_S + 63 * ROW_S]) for _ in range(2))
    few.learn_slope(64 + 4, curve(64) + 4 * 3 * ROW_S)
    many.learn_slope(64 + 64, curve(64) + 64 * 3 * ROW_S)
    assert curve(100) < few(100) < many(100)
    curve.learn_slope(64, 1.0)
    assert curve(100) == pytest.approx(FIRST_S + 99 * ROW_S)


def test_one_late_step_does_not_set_the_slope(curve: StepCurve) -> None:
    """A row takes between zero and some times the mean of the measured ones."""
    curve.learn_slope(128, 1e9)
    assert curve(65) - curve(64) <= MOST_SLOPE * curve(64) / 64
    for _ in range(500):
        curve.learn_slope(128, 0.0)
    assert curve(64) <= curve(1000) < 1.1 * curve(64)


def test_a_round_that_waits_for_drafts_verifies_more_of_them() -> None:
    """A node that does not raise tokens per second of steps alone raises those per second of whole rounds; the curve
    itself stays."""
    curve = StepCurve([1, 2, 3], [0.005, 0.006, 0.007])
    reach_prob, needed = np.array([0.3, 0.15]), np.zeros(2, np.intp)
    counts = [best_count(reach_prob, needed, 1, 1, 8, curve.after(seconds)) for seconds in (0.0, 0.002, 0.02)]
    assert counts == [1, 1, 2]
    assert curve.extra_s == 0.0
    assert curve.after(0.25)(2) == pytest.approx(0.256)
