"""What is computed of arrays on the host is what torch computes of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specq.protocol import SamplingParams
from specq.verification.drafting import truncated_distributions
from specq.verification.host_logits import on_host, without_bad_rows
from specq.verification.logprobs import BegunLogprobs, begin_logprobs, likeliest
from specq.verification.sampling import choose_tokens, near_scores, perturbed_scores, target_probs
from tests.each import each

VOCAB = 3000
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_p=0.9),
    SamplingParams(temperature=0.6, seed=3, top_k=7),
    SamplingParams(temperature=1.0, seed=4, min_p=0.05),
]


def logits_of(seed: int, num_rows: int = len(PARAMS)) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB)).astype(np.float32)


@each("seed", range(5))
def test_scores_and_distributions_of_arrays_are_those_of_tensors(seed: int) -> None:
    logits, positions = logits_of(seed), range(5, 5 + len(PARAMS))
    tensor = torch.from_numpy(logits)
    scores = perturbed_scores(logits, PARAMS, positions)
    assert np.array_equal(scores, perturbed_scores(tensor, PARAMS, positions).numpy())
    assert scores.argmax(1).tolist() == choose_tokens(logits, PARAMS, positions).tolist()
    np.testing.assert_allclose(
        target_probs(logits, PARAMS), target_probs(tensor, PARAMS).numpy(), rtol=1e-9, atol=1e-12
    )
    names = np.arange(0, 3 * VOCAB, 3, dtype=np.int32)
    free = [SamplingParams(temperature=0.7, seed=9)] * len(PARAMS)
    for ids in (None, names):
        exact = perturbed_scores(tensor, free, positions, ids).numpy()
        np.testing.assert_allclose(near_scores(logits, free, positions, ids), exact, atol=1e-4)


def test_draft_distributions_have_the_likeliest_tokens_best_first() -> None:
    logits = logits_of(1)
    ids, weights = truncated_distributions(torch.from_numpy(logits), PARAMS, 32)
    assert (ids.shape, weights.shape) == ((len(PARAMS), 32), (len(PARAMS), 32))
    expected = target_probs(torch.from_numpy(logits), PARAMS).topk(32, dim=-1)
    has_some = weights > 0
    assert ids[has_some].tolist() == expected.indices.numpy()[has_some].tolist()
    assert (ids[~has_some] == -1).all()


@each("num_top", [0, 1, 5, 20])
def test_log_probabilities_of_arrays_are_those_of_tensors(num_top: int) -> None:
    """More rows than are processed at a time, and a wide vocabulary, of which only parts are sorted."""
    logits = logits_of(7, 130)
    tokens = np.random.default_rng(8).integers(0, VOCAB, 130).astype(np.int32)
    values, top_ids = begin_logprobs(logits, tokens, num_top).wait()
    tensor = torch.from_numpy(logits)
    expected, expected_ids = BegunLogprobs(tensor, torch.from_numpy(tokens).long(), num_top).wait()
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert top_ids.tolist() == expected_ids.tolist()


def test_among_equals_the_lowest_token_is_first_and_what_is_no_number_is_last() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [7, 2500, 11]] = 5, 5, 6
    assert likeliest(logits, 5).tolist() == [[11, 7, 2500, 0, 1]]
    logits[0, 100] = np.nan
    assert likeliest(logits, 3).tolist() == [[11, 7, 2500]]
    assert likeliest(np.full((1, 8), -np.inf, np.float32), 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_a_cpu_become_arrays_without_a_copy_if_they_fit(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(logits_of(3)).to(dtype)
    found = on_host(tensor)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, tensor.float().numpy())
    assert np.shares_memory(found, tensor.float().numpy()) == (dtype == torch.float32)


def test_rows_without_a_token_are_the_same_in_arrays_and_tensors() -> None:
    logits = logits_of(5)
    logits[1, 3], logits[2], logits[3, 0] = np.nan, -np.inf, np.inf
    for given in (logits, torch.from_numpy(logits)):
        highest, is_bad, valid = without_bad_rows(given)
        assert is_bad.tolist() == [False, True, True, True, False]
        assert np.isfinite(highest[[0, 4]]).all()
        assert np.asarray(valid)[1:4].tolist() == np.zeros((3, VOCAB)).tolist()
