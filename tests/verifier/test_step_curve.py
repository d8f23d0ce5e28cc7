"""What a step takes, as it is learned in service: what nodes cost beside their rows is told from what all steps
cost."""

import numpy as np
import pytest

from specq.verifier import StepCurve
from specq.verifier.step.node_choice import best_count

ROW_S, FIRST_S = 0.0001, 0.004


@pytest.fixture
def curve() -> StepCurve:
    return StepCurve([1, 64], [FIRST_S, FIRST_S + 63 * ROW_S])


def serve(curve, steps, *, sessions=16, nodes=8, extra_s=0.001, node_s=0.0002):
    """Let it learn from steps of so many sessions and nodes which take longer than was profiled."""
    for _ in range(steps):
        rows = sessions + nodes
        curve.learn(rows, FIRST_S + (rows - 1) * ROW_S + extra_s + nodes * node_s, nodes)


def test_what_nodes_cost_is_learned_beside_plain_steps(curve):
    """Sixteen sessions with eight nodes: first in turns with plain steps, as in trials of sources, then for long
    without."""
    for _ in range(4):
        serve(curve, 40)
        serve(curve, 40, nodes=0)
    serve(curve, 1000)
    assert curve.node_s == pytest.approx(0.0002, rel=0.05)
    assert curve.extra_s == pytest.approx(0.001, rel=0.05)
    assert curve(24, 8) == pytest.approx(FIRST_S + 23 * ROW_S + 0.001 + 8 * 0.0002, rel=0.01)
    np.testing.assert_allclose(curve.times(16, 9), [curve(16 + n, n) for n in range(9)])
    assert curve.slope(16) == pytest.approx(ROW_S + 0.0002, rel=0.05)


def test_without_plain_steps_nothing_is_known_of_nodes(curve):
    serve(curve, 1000)
    assert curve.node_s == 0.0
    assert curve.extra_s == pytest.approx(0.001 + 8 * 0.0002, rel=0.01)


def test_another_load_is_nothing_to_compare_with(curve):
    """Plain steps of sixteen sessions say nothing about drafted ones of one session, which take less time beyond the
    profile."""
    for _ in range(4):
        serve(curve, 40)
        serve(curve, 40, nodes=0)
    serve(curve, 200, sessions=1, nodes=4, extra_s=0.0001)
    assert curve.node_s == pytest.approx(0.0002, rel=0.05)


def test_nodes_that_were_dear_are_tried_again(curve):
    """Where none is verified any more, nothing could tell that they became cheaper."""
    for _ in range(4):
        serve(curve, 40)
        serve(curve, 40, nodes=0)
    serve(curve, 2000, nodes=0)
    assert curve.node_s < 0.00002


def test_one_step_that_was_late_is_no_measurement(curve):
    serve(curve, 40, nodes=0, node_s=0.0)
    curve.learn(24, 100.0, 8)
    assert curve.node_s <= 4.0 * curve(24) / 24
    serve(curve, 45, node_s=0.0)
    assert curve.node_s == pytest.approx(0.0, abs=2e-5)


def test_a_round_that_waits_for_drafts_verifies_more_of_them() -> None:
    """A node that does not raise tokens per second of steps alone raises those per second of whole rounds; the curve
    itself stays."""
    curve = StepCurve([1, 2, 3], [0.005, 0.006, 0.007])
    reach_prob, needed = np.array([0.3, 0.15]), np.zeros(2, np.intp)
    counts = [best_count(reach_prob, needed, 1, 1, 8, curve.after(seconds)) for seconds in (0.0, 0.002, 0.02)]
    assert counts == [1, 1, 2]
    assert curve.extra_s == 0.0
    assert curve.after(0.25)(2) == pytest.approx(0.256)
