"""Temperature, top-k, top-p, min-p and the perturbed scores, against the oracle, row by row."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol.params import SamplingParams
from specq.testing import oracle
from specq.testing.random_steps import sampling_params
from specq.verification.sampling import choose_tokens, near_scores, perturbed_scores, target_probs
from tests.each import each

ROWS = st.lists(sampling_params(), min_size=1, max_size=6)


def logits_of(entropy, num_rows, vocab=12, *, coarse=False):
    logits = np.random.default_rng(entropy).normal(0, 2, (num_rows, vocab)).astype(np.float32)
    return torch.from_numpy(np.round(logits) if coarse else logits)


@pytest.mark.usefixtures("way")
class TestAgainstTheOracle:
    @given(ROWS, st.integers(0, 2**32), st.booleans())
    def test_target_probs(self, params, entropy, coarse):
        logits = logits_of(entropy, len(params), coarse=coarse)
        expected = [oracle.distribution(row, p) for row, p in zip(logits.numpy(), params, strict=True)]
        actual = target_probs(logits, params).numpy()
        assert np.array_equal(np.array(expected) > 0, actual > 0)
        assert np.abs(actual - expected).max() < 1e-12

    @given(ROWS, st.integers(0, 2**32), st.booleans())
    def test_tokens(self, params, entropy, coarse):
        logits = logits_of(entropy, len(params), coarse=coarse)
        positions = [3 * i + entropy % 1000 for i in range(len(params))]
        expected = [oracle.own_token(*row) for row in zip(logits.numpy(), params, positions, strict=True)]
        assert expected == choose_tokens(logits, params, positions).tolist()
        assert expected == perturbed_scores(logits, params, positions).argmax(-1).tolist()


def test_scores_are_the_plain_logits_at_temperature_zero():
    logits = logits_of(0, 3)
    assert perturbed_scores(logits, [SamplingParams(top_p=0.5, top_k=2)] * 3, [1, 2, 3]) is logits


@each(("vocab", "has_columns"), product([5, 8, 4099], [False, True]))
def test_guesses_are_near_the_scores(vocab, has_columns):
    """For all hashes, the least and the greatest among them: the noise of 40 rows of up to 4099 tokens."""
    params = [SamplingParams(temperature=0.5 + seed / 40, seed=seed) for seed in range(40)]
    token_ids = np.arange(3, 3 + 2 * vocab, 2, dtype=np.int32) if has_columns else None
    rows = logits_of(1, len(params), vocab), params, range(len(params)), token_ids
    torch.testing.assert_close(near_scores(*rows), perturbed_scores(*rows), atol=2e-5, rtol=0)


@given(ROWS, st.integers(0, 2**32), st.integers(0, 2**31 - 100))
def test_a_rows_scores_do_not_depend_on_its_batch(params, entropy, position):
    logits = logits_of(entropy, len(params))
    positions = [position] * len(params)
    together = perturbed_scores(logits, params, positions)
    for i, p in enumerate(params):
        alone = perturbed_scores(logits[i : i + 1], [p], [position])
        assert torch.equal(together[i], alone[0].to(together.dtype))


@each("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types(dtype):
    logits = logits_of(1, 4).to(dtype)
    params = [SamplingParams(), *[SamplingParams(temperature=0.7, top_p=p, seed=4) for p in (1.0, 0.9, 0.5)]]
    positions = [5, 6, 7, 8]
    expected = choose_tokens(logits.float(), params, positions)
    assert expected.tolist() == choose_tokens(logits, params, positions).tolist()


@each("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature):
    logits = logits_of(2, 8) * 100
    for params in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)):
        probs = target_probs(logits, [params] * 8)
        assert torch.isfinite(probs).all()
        assert probs.sum(1).numpy() == pytest.approx(1)


def test_ties_at_the_edges_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (
        SamplingParams(temperature=1, top_k=2),
        SamplingParams(temperature=1, top_p=0.6),
        SamplingParams(temperature=1, min_p=float(np.exp(-1)) - 1e-7),
    ):
        assert (target_probs(logits, [params])[0] > 0).tolist() == [True, True, True, True, False]
    assert choose_tokens(torch.tensor([[0.0, 3.0, 3.0]]), [SamplingParams()], [0]).tolist() == [1]


@each("strategy", ["deterministic", "probabilistic", "threshold", "typical", "greedy"])
def test_a_top_p_of_0_is_the_likeliest_token(strategy):
    """One token at any temperature and seed, also among ties: the parameters are those of a greedy job."""
    greedy = SamplingParams(strategy=strategy, seed=5)
    for top_p in (0, 0.0, -0.0):
        assert SamplingParams(temperature=1.7, top_p=top_p, strategy=strategy, seed=5) == greedy
        assert SamplingParams.from_dict({"temperature": 1.7, "top_p": top_p, "strategy": strategy, "seed": 5}) == greedy
    logits = torch.cat([logits_of(6, 8), torch.tensor([[0.0, 3.0, 3.0] + [0.0] * (logits_of(6, 8).shape[1] - 3)])])
    params = [SamplingParams(temperature=2.0, top_p=0, seed=seed) for seed in range(9)]
    assert choose_tokens(logits, params, range(9)).tolist() == logits.numpy().argmax(1).tolist()


def test_top_p_counts_within_what_top_k_kept():
    """Of 0.4, 0.3, 0.2, 0.1, top-k 3 leaves 4/9, 3/9, 2/9: top-p 0.75 then needs two; of the whole it needs three."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    both = SamplingParams(temperature=1, top_k=3, top_p=0.75)
    assert target_probs(logits, [both])[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    alone = SamplingParams(temperature=1, top_p=0.75)
    assert target_probs(logits, [alone])[0].tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])


def test_wide_rows_whose_top_p_set_exceeds_the_head():
    logits = logits_of(3, 4, vocab=5000) * 0.01  # nearly flat: 0.9 of the mass is thousands of tokens
    params = [
        *(SamplingParams(temperature=1, top_p=0.9), SamplingParams(temperature=1, top_k=700), SamplingParams()),
        SamplingParams(temperature=0.5, top_k=300, top_p=0.99),
    ]
    actual = target_probs(logits, params).numpy()
    for row, p, probs in zip(logits.numpy(), params, actual, strict=True):
        expected = oracle.distribution(row, p)
        assert abs((expected > 0).sum() - (probs > 0).sum()) <= 1  # sums in another order may move the edge by one
        assert np.abs(probs - expected).sum() < 2e-3
    assert (actual[0] > 0).sum() > 4000
