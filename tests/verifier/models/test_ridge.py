"""Weights are found from one pair after another; old pairs fade, and one that is far off counts little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.verifier.models.ridge import Ridge

TRUE = np.array([0.2, -0.1, 0.05])
PRIOR = 0.3, 0.3, 0.3


def learned(num_pairs: int, true: np.ndarray = TRUE, ridge: Ridge | None = None, noise: float = 0.02) -> Ridge:
    """Return a model after a number of noisy pairs."""
    rng = np.random.default_rng(num_pairs)
    ridge = ridge or Ridge(PRIOR, memory=100.0, usual=0.05, cut=3.0)
    for _ in range(num_pairs):
        x = np.array([1.0, *rng.uniform(-1, 1, 2)])
        ridge.learn(x, float(x @ true) + rng.normal(0, noise))
    return ridge


def test_weights_are_found_again_from_noisy_pairs() -> None:
    ridge = learned(400)
    assert ridge.weights == pytest.approx(TRUE, abs=0.01)
    assert ridge.usual == pytest.approx(0.02, rel=0.35)


def test_before_anything_is_known_the_weights_are_nought_and_the_prior_says_how_far_off() -> None:
    ridge = Ridge((0.3, 0.1), memory=100.0, usual=0.05, cut=3.0)
    assert ridge.weights.tolist() == [0.0, 0.0]
    assert ridge.deviation(np.array([1.0, 0.0])) == pytest.approx(0.3, rel=0.01)
    assert ridge.deviation(np.array([0.0, 1.0])) == pytest.approx(0.1, rel=0.01)
    assert ridge.deviation(np.array([1.0, 1.0])) == pytest.approx(0.1**0.5, rel=0.01)


@pytest.mark.parametrize("error", [0.15, 1.0, 1e9])
def test_a_residual_beyond_the_cut_counts_as_noisier(error: float) -> None:
    """So the farther off it is, the less it counts; the usual residual grows by the cut at most."""
    x, ridge = np.array([1.0, 0.5, 0.5]), Ridge(PRIOR, memory=100.0, usual=0.05, cut=3.0)
    ridge.learn(x, error)
    noise = max(0.05, error / 3.0)
    assert ridge.weights == pytest.approx(0.09 * x * error / (0.09 * x @ x + noise**2), rel=0.01)
    assert ridge.usual == pytest.approx(0.05 + 0.05 * (1.25 * 0.15 - 0.05))


def test_what_was_never_seen_is_learned_at_once_although_all_else_is_precise() -> None:
    """As the first steps with drafts after many without."""
    ridge = Ridge(PRIOR, memory=100.0, usual=0.05, cut=3.0)
    for _ in range(200):
        ridge.learn(np.array([1.0, 0.0, 0.0]), 0.1, 0.01)
    ridge.learn(np.array([1.0, 1.0, 0.0]), 0.5, 0.01)
    assert ridge.weights[1] > 0.7 * 0.4
    ridge.learn(np.array([1.0, 1.0, 0.0]), 0.5, 0.01)
    assert ridge.weights[:2] == pytest.approx([0.1, 0.4], abs=0.02)


def test_an_outlier_hardly_moves_what_many_pairs_said() -> None:
    ridge = learned(400)
    x = np.array([1.0, 0.5, 0.5])
    before = float(ridge.weights @ x)
    ridge.learn(x, 1e9)
    assert abs(float(ridge.weights @ x) - before) < 0.01
    assert ridge.usual < 0.03


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_old_pairs_fade(factor: float) -> None:
    """Within three memories all is as if there had been no other weights."""
    ridge = learned(2000)
    assert learned(300, factor * TRUE, ridge).weights == pytest.approx(factor * TRUE, abs=0.015)


def test_what_is_seen_no_more_is_known_less_and_less() -> None:
    """Its weight stays."""
    ridge, rng = learned(400), np.random.default_rng(0)
    seldom, usual = np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])
    weight, before = float(ridge.weights[1]), ridge.deviation(seldom)
    for _ in range(3000):
        ridge.learn(usual, TRUE[0] + rng.normal(0, 0.02))
    assert ridge.deviation(seldom) > 4 * before
    assert ridge.deviation(seldom) > 4 * ridge.deviation(usual)
    assert ridge.weights[1] == pytest.approx(weight, abs=0.01)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-50, 50)), max_size=120), st.floats(0.01, 100))
def test_no_weight_is_less_sure_than_at_first(pairs: list[tuple[float, float, float]], usual: float) -> None:
    """For any observations and any noise."""
    ridge = Ridge((0.3, 0.01), memory=2.0, usual=usual, cut=3.0)
    for a, b, y in pairs:
        ridge.learn(np.array([a, b]), y)
    assert (np.diag(ridge.cov) <= np.array([0.09, 0.0001]) * (1 + 1e-9)).all()
    assert np.linalg.eigvalsh(ridge.cov).min() > -1e-9


def test_pairs_that_are_noisy_by_themselves_say_less() -> None:
    x = np.array([1.0, 0.0, 0.0])
    precise, noisy = (Ridge(PRIOR, memory=100.0, usual=0.05, cut=3.0) for _ in range(2))
    precise.learn(x, 0.1)
    noisy.learn(x, 0.1, 1.0)
    assert 0 < noisy.weights[0] < 0.1 * precise.weights[0]
    assert noisy.deviation(x) > precise.deviation(x)


def test_a_constant_residual_is_not_a_deviation() -> None:
    """Of pairs that never fail, though old ones fade."""
    ridge, x = Ridge(PRIOR, memory=20.0, usual=0.05, cut=3.0), np.array([1.0, 0.0, 0.0])
    for _ in range(500):
        ridge.learn(x, 0.1, 0.01)
    assert ridge.deviation(x) < 0.005
    assert ridge.weights[0] == pytest.approx(0.1, abs=1e-3)
