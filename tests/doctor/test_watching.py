"""What is made of the verdicts and times of runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specq.doctor.hardware import comparable
from specq.doctor.measuring import WatchedRun, host_times, round_of, scaled, slowness, usual
from specq.doctor.prediction import PredictedRound, PredictedRounds
from specq.protocol import Verdict
from specq.verifier import StepCurve

ROUNDS = PredictedRounds((PredictedRound(0),) * 4)
RUN = WatchedRun("plain", 1, ROUNDS, ((1, 2, 3), (4,)), seconds=0.04, own_s=0.001, engine_s=0.03, curve_s=0.02)


def test_a_round_counts_nodes_by_depth():
    """Two children of the text, a child of the first, and one of that; the first and its child were accepted."""
    arrays = {"node_ids": np.arange(4, dtype=np.int32), "node_parents": np.array([-1, -1, 0, 2], np.int32)}
    verdict = Verdict(session_id=1, epoch=1, base_len=9, token_ids=np.array([5, 6, 7], np.int32), **arrays)
    assert round_of(verdict) == PredictedRound(2, (2, 1, 1))
    assert round_of(Verdict(session_id=1, epoch=1, base_len=9, token_ids=np.array([5], np.int32))) == PredictedRound(0)


def test_the_largest_tenth_does_not_count():
    assert usual([1.0] * 9 + [50.0]) == 1.0
    assert usual([3.0]) == 3.0
    assert usual([]) == 0.0


def test_texts_agree_as_far_as_both_go():
    assert RUN.agrees_with(replace(RUN, texts=((1, 2), (4, 5))))
    assert RUN.agrees_with(replace(RUN, texts=((1, 2, 3, 9),)))
    assert not RUN.agrees_with(replace(RUN, texts=((1, 3), (4,))))


def test_steps_that_took_longer_than_the_curve_says_make_all_steps_longer():
    curve = StepCurve([1, 4, 8], [0.010, 0.012, 0.020])
    factor = slowness([RUN, replace(RUN, engine_s=0.01, curve_s=0.02)])
    assert factor == 1.0
    slower = scaled(curve, slowness([RUN]))
    assert [slower(rows) / curve(rows) for rows in (1, 3, 8, 20)] == pytest.approx([1.5] * 4, rel=0.1)
    assert slowness([replace(RUN, curve_s=0.0)]) == 1.0


def test_the_host_has_more_to_do_for_more_sessions_and_never_less():
    assert host_times(RUN, replace(RUN, num_sessions=4, own_s=0.004)) == pytest.approx((0.001, 0.001))
    assert host_times(RUN, replace(RUN, num_sessions=4, own_s=0.0005)) == (0.001, 0.0)


def test_fewer_cores_do_not_compute_faster():
    """What a helper is kept waiting for by somebody else is nothing that a draft worker's core would gain."""
    unhelped, with_help = {1: [0.010] * 3, 8: [0.02] * 3}, {1: [0.005] * 3, 8: [0.08, 0.07, 0.09]}
    alone, together = comparable(unhelped, with_help)
    assert (together(1), alone(1)) == (0.005, 0.010)
    assert all(alone(rows) >= together(rows) for rows in (1, 4, 8, 100, 512))
    assert alone(8) == together(8) == pytest.approx(0.075)
