"""Whether drafters are listened to, by what they were measured to bring."""

import numpy as np
import pytest

from specq.verifier.arms import FIRST_PATIENCE, MOST_PATIENCE, WINDOW_S, Arms

STEP_S = 0.01


class Service(Arms):
    """Arms, and drafters that bring something or not."""

    def __init__(self):
        super().__init__()
        self.drafted = 0

    def serve(self, seconds, gain, *, sessions=1, drafters=True, noise=0.0, rng=None, drift=0.0):
        """Serve for so long with drafts that bring `gain` times the tokens a second; return the share of time with drafts."""
        spent, with_drafts = 0.0, 0.0
        while spent < seconds:
            listens = self.wants_drafts
            step_s = STEP_S * (1 + drift * spent / seconds)
            tokens = 100 * sessions * (gain if listens and drafters else 1.0)
            if noise:
                tokens *= max(0.1, 1 + noise * rng.standard_normal())
            self.drafted += 5 if listens and drafters else 0
            self.learn(sessions, round(tokens), step_s, self.drafted)
            spent += step_s
            with_drafts += step_s * listens
        return with_drafts / spent


@pytest.mark.parametrize(
    ("gain", "least", "most"), [(1.3, 0.9, 1.0), (1.05, 0.9, 1.0), (0.95, 0.0, 0.1), (0.6, 0.0, 0.1)]
)
def test_the_better_arm_has_nearly_all_of_the_time(gain, least, most):
    """After half a minute; before that it finds out."""
    arms = Service()
    arms.serve(30, gain)
    assert least <= arms.serve(100, gain) <= most


@pytest.mark.parametrize("gain", [1.1, 0.9])
def test_noise_is_averaged_out(gain):
    """Steps whose tokens vary by two thirds, on ten seeds: what is lost against the better arm is at most 2%."""
    for seed in range(10):
        rng, arms = np.random.default_rng(seed), Service()
        share = arms.serve(120, gain, noise=0.67, rng=rng)
        rate = share * gain + 1 - share
        assert rate >= 0.98 * max(gain, 1.0)


def test_a_machine_that_slows_down_says_nothing_about_drafts():
    """A trial is compared with what was before and after it: a drift of the steps' time by half moves no arm."""
    arms = Service()
    assert arms.serve(60, 1.04, drift=0.5) > 0.8


def test_the_answer_changes_with_what_is_measured():
    """Drafts that were useless bring something now, and are heard again within some trials."""
    arms = Service()
    arms.serve(60, 0.8)
    assert not arms.wants_drafts
    arms.serve(60, 1.4)
    assert arms.serve(60, 1.4) > 0.8


def test_each_load_has_its_own_answer():
    """Drafts pay for one session and not for sixteen."""
    arms = Service()
    for _ in range(30):
        arms.serve(2, 1.3, sessions=1)
        arms.serve(2, 0.8, sessions=16)
    assert arms.serve(2, 1.3, sessions=1) > 0.8
    assert arms.serve(2, 0.8, sessions=16) < 0.2


def test_without_drafters_nothing_is_tried():
    """There is nobody to silence."""
    arms = Service()
    assert arms.serve(30, 1.0, drafters=False) == 1.0


def test_drafters_that_have_gone_are_looked_for_more_and_more_rarely():
    """Once silenced, they are waited for in vain: each trial lasts a window."""
    arms = Service()
    arms.serve(20, 0.7)
    arms.serve(60, 0.7, drafters=False)
    share = arms.serve(200, 0.7, drafters=False)
    assert 0 < share < 4 / MOST_PATIENCE


def test_a_window_holds_some_round_trips():
    """With a round trip of 0.5 s, an arm is measured for 2.5 s, after a second that is left out."""
    arms = Service()
    for _ in range(200):
        arms.learn_round_trip(0.5)
    spent, drafted = 0.0, 0
    while arms.wants_drafts:
        drafted += 1
        arms.learn(1, 10, STEP_S, drafted)
        spent += STEP_S
    assert spent == pytest.approx(FIRST_PATIENCE * 5 * 0.5 + 2 * 0.5, rel=0.05)
    assert spent > 4 * WINDOW_S
