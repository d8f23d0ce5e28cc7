"""What each source of drafts can do at best, by what it was seen to do."""

import pytest

from specq.protocol import EAGLE, SUFFIX
from specq.verifier.control.source_yields import ROUNDS, SourceBounds, Yield


def seen(num_sessions, *rounds, step_s=1.0):
    """Return the bounds after rounds of one source: its seconds and tokens in each."""
    bounds = SourceBounds()
    for seconds, tokens in rounds:
        bounds.learn(num_sessions, step_s, {EAGLE}, {EAGLE: Yield(seconds, tokens), SUFFIX: Yield(0.5, 0.0)})
    return bounds


def test_nothing_is_known_after_a_single_round():
    """Something may have been compiled in it. Of what sent nothing, nothing is known at all."""
    assert seen(1, *[(2.0, 1)] * (ROUNDS - 1)).best(EAGLE, 1) is None
    known = seen(1, (2.0, 1), *[(0.05, 1)] * (ROUNDS - 1))
    assert known.best(EAGLE, 1).seconds == 0.05
    assert known.best(SUFFIX, 1) is None


@pytest.mark.parametrize(("num_sessions", "least_s"), [(4, 0.08), (16, 0.08), (2, 0.04), (1, 0.02)])
def test_seconds_of_one_load_bound_those_of_others(num_sessions, least_s):
    """More sessions take no less; half as many no less than half."""
    assert seen(4, *[(0.08, 4)] * 3).best(EAGLE, num_sessions).seconds == pytest.approx(least_s)


def test_few_rounds_leave_more_open_than_many():
    """The bound lies above the mean, and comes down to it; it is that of so many sessions."""
    few, many = (seen(2, *[(0.05, 2), (0.05, 4)] * count).best(EAGLE, 1).tokens for count in (1, 40))
    assert 1.5 < many < 2.0 < few
    assert seen(2, *[(0.05, 2), (0.05, 4)] * 40).best(EAGLE, 8).tokens == pytest.approx(8 * many)


def test_no_source_takes_longer_than_the_step():
    assert seen(1, *[(0.5, 1)] * 3, step_s=0.01).best(EAGLE, 1).seconds == pytest.approx(0.01)


def test_what_became_dearer_is_believed_after_some_rounds():
    """One slow round is a disturbance, fifty are not."""
    cheap = [(0.01, 1)] * 5
    assert seen(1, *cheap, (0.1, 1)).best(EAGLE, 1).seconds < 0.02
    assert seen(1, *cheap, *[(0.1, 1)] * 80).best(EAGLE, 1).seconds > 0.09
