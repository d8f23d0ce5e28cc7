"""Distributions on the wire: what is sent is what was sampled from; and what is malformed is named."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol.params import SamplingParams
from specq.testing import oracle
from specq.verification.drafting import draw_children, truncated_distributions

WARM = SamplingParams(temperature=1.0)


def test_distributions_are_the_likeliest_tokens_in_integers():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2], [1, 1e-6, 1e-4, 1e-6]]).log()
    ids, weights = truncated_distributions(logits, [WARM, WARM], 3)
    assert ids[0].tolist() == [0, 2, 3]
    assert weights[0].tolist() == [65535, 49151, 32767]
    assert weights.dtype == np.uint16
    assert ids[1].tolist() == [0, 2, -1]  # what rounds to no weight is no part of the distribution
    assert weights[1].tolist() == [65535, 7, 0]


@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([1.0, 0.8]))
def test_distributions_are_close_to_the_draft_models(entropy, size, temperature, top_p):
    logits = torch.from_numpy(np.random.default_rng(entropy).normal(0, 2, (3, 12)).astype(np.float32))
    params = SamplingParams(temperature=temperature, top_p=top_p)
    ids, weights = truncated_distributions(logits, [params] * 3, size)
    for row, own_ids, own in zip(logits.numpy(), ids, weights, strict=True):
        assert ((own_ids >= 0) == (own > 0)).all()
        kept = oracle.distribution(row, params)[own_ids[own > 0]]
        assert own[own > 0] / own.sum() == pytest.approx(kept / kept.sum(), abs=1e-4)


def test_children_are_drawn_from_the_integers_without_replacement():
    ids, weights = np.array([[7, 3, 5, -1]], np.int32), np.array([[1, 2, 5, 0]], np.uint16)
    count = 20_000
    drawn = draw_children(np.tile(ids, (count, 1)), np.tile(weights, (count, 1)), 4, np.random.default_rng(1))
    first, second = drawn.token_ids[:, 0], drawn.token_ids[:, 1]
    for token, probability in ((7, 1 / 8), (3, 2 / 8), (5, 5 / 8)):
        assert (first == token).mean() == pytest.approx(probability, abs=0.015)
    assert (second[first == 5] == 3).mean() == pytest.approx(2 / 3, abs=0.015)
    assert all(set(row) == {7, 3, 5} for row in drawn.token_ids[:, :3])
    assert (drawn.token_ids[:, 3] == -1).all()
    assert np.exp(drawn.scores[0, 0]) == pytest.approx((1 + 4 + 25) / 64)


def test_a_score_is_known_before_its_token_is_drawn():
    ids, weights = np.arange(8, dtype=np.int32)[None], (np.arange(8, dtype=np.uint16) * 999)[None]
    drawn = [draw_children(ids, weights, 2, np.random.default_rng(seed)) for seed in range(50)]
    assert len({d.scores[0, 0] for d in drawn}) == 1
    by_first = {}
    for d in drawn:
        by_first.setdefault(d.token_ids[0, 0], set()).add(float(d.scores[0, 1]))
    assert all(len(scores) == 1 for scores in by_first.values())
