"""How deep a round is drafted for: as deep as pays, whatever changes."""

import numpy as np
import pytest

from specq.drafting.draft_model.round_choice import MOST_PATIENCE, NO_LOAD, OtherLoad, RoundChoice
from specq.verifier.control.step_curve import StepCurve

FLAT = StepCurve([1, 1024], [0.004, 0.004])
DEAR = StepCurve([1, 1024], [0.004, 4.0])
MOST = 8


def choice(level_s: float) -> RoundChoice:
    return RoundChoice(StepCurve([1, 64], [level_s, level_s]), MOST)


def run(own: RoundChoice, curve: StepCurve, accept_prob: float, rounds: int, num_sessions: int = 4) -> list[int]:
    """Return the depths of this many rounds with chains whose tokens are accepted with this probability."""
    rng, depths = np.random.default_rng(0), []
    for _ in range(rounds):
        depths.append(own.choose(num_sessions, curve))
        if depths[-1]:
            accepted = (rng.random((num_sessions, depths[-1])) < accept_prob).cumprod(1).sum(1)
            own.learn_chains(np.minimum(accepted + 1, depths[-1]).tolist(), accepted.tolist())
    return depths


def rate(depth: float, curve: StepCurve, level_s: float, accept_prob: float, num_sessions: int = 4) -> float:
    """Return the expected tokens a second of a session at a depth, by the formula."""
    tokens = sum(accept_prob**i for i in range(int(depth) + 1))
    return tokens / (curve(num_sessions * (1 + int(depth))) + depth * level_s)


@pytest.mark.parametrize("level_s", [0.0002, 0.0005, 0.001, 0.002])
@pytest.mark.parametrize("accept_prob", [0.5, 0.7, 0.9])
def test_the_depth_is_the_best_for_what_is_measured(level_s, accept_prob):
    """Or as good as the best, after some rounds."""
    depth = float(np.median(run(choice(level_s), FLAT, accept_prob, 200)[100:]))
    best = max(rate(depth, FLAT, level_s, accept_prob) for depth in range(MOST + 1))
    assert rate(depth, FLAT, level_s, accept_prob) > 0.95 * best


def test_where_rows_are_dear_none_are_drafted():
    """Trials become rare."""
    depths = run(choice(0.001), DEAR, 0.9, 4000, num_sessions=64)
    assert sum(depth > 0 for depth in depths[-MOST_PATIENCE:]) <= 1
    assert sum(depth > 0 for depth in depths) > 3


def test_useless_chains_end_and_good_ones_come_back():
    """A change is noticed within the longest patience and a few trials."""
    own = choice(0.001)
    assert run(own, FLAT, 0.9, 50)[-1] > 3
    assert run(own, FLAT, 0.0, 400)[-20:].count(0) >= 19
    assert run(own, FLAT, 0.95, 20 * MOST_PATIENCE)[-1] > 2


def test_slow_levels_make_chains_short():
    """The time of drafting in service counts, but not one draft during which something else happened."""
    own = choice(0.0005)
    deep = run(own, FLAT, 0.8, 50)[-1]
    own.learn_draft(4, 4, 60.0)
    assert run(own, FLAT, 0.8, 20)[-1] == deep
    for _ in range(100):
        own.learn_draft(4, 4, 4 * 0.0012)
    assert run(own, FLAT, 0.8, 20)[-1] < deep


def test_a_single_pass_for_all_levels_makes_chains_deep():
    """A level more costs nothing then; what a short draft took says as much of a deep one. Where a pass is dearer than
    all that it may bring, there is none."""
    levels = StepCurve([1, 64], [0.0005, 0.0005])
    flat = RoundChoice(levels, MOST, is_one_pass=True)
    each = RoundChoice(StepCurve([1, 64], [0.0005, 0.0005]), MOST)
    assert run(flat, FLAT, 0.6, 50)[-1] == MOST > run(each, FLAT, 0.6, 50)[-1]
    for _ in range(100):
        flat.learn_draft(4, 2, MOST * 0.0005)
    assert levels(4) == pytest.approx(0.0005)
    assert flat.best(4, FLAT) == MOST
    dear = RoundChoice(StepCurve([1, 64], [0.02, 0.02]), MOST, is_one_pass=True)
    assert dear.best(4, FLAT) == 0


@pytest.mark.parametrize(("max_rows", "depth"), [(512, 3), (511, 3), (384, 2), (300, 2), (256, 1), (130, 0), (128, 0)])
def test_no_level_is_drafted_for_which_a_step_has_no_rows(max_rows, depth):
    """Of 128 sessions; the last level need not have rows for all, if those that it has bring what it takes."""
    own, level_s = choice(0.0005), 0.0005
    for _ in range(200):
        own.learn_chains([MOST], [MOST])
    assert own.best(128, FLAT) == MOST
    assert own.choose(128, FLAT, max_rows=max_rows) == depth
    own.foresee(128, FLAT, max_rows)
    assert own.choose(128, FLAT, max_rows=max_rows) == depth
    rates = [(128 + min(128 * i, max_rows - 128)) / (0.004 + i * level_s) for i in range(MOST + 1)]
    assert int(np.argmax(rates)) == depth


def test_counts_are_of_positions():
    """A chain that was judged up to its third token; two were accepted."""
    own = choice(0.001)
    for _ in range(1000):
        own.learn_chains([3, 1], [2, 1])
    assert own.accept_probs()[:3] == pytest.approx([1.0, 1.0, 0.0], abs=0.05)


def test_what_was_foreseen_is_chosen_once_and_for_as_many_sessions_alone() -> None:
    choice = RoundChoice(StepCurve([1, 8], [0.001, 0.001]), 4)
    cheap, dear = StepCurve([1, 64], [0.02, 0.02]), StepCurve([1, 64], [0.001, 1.0])
    (most, none) = (choice.best(8, curve) for curve in (cheap, dear))
    assert most > none
    for num_sessions, other, expected in ((8, NO_LOAD, most), (7, NO_LOAD, none), (8, OtherLoad(9, 9.0), none)):
        choice.foresee(8, cheap)
        assert choice.choose(num_sessions, dear, other) == expected
        assert choice.choose(8, dear) == none
