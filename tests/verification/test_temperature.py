"""Temperatures at the ends of what is allowed: logits / T never overflow, and what is as good as 0 is 0."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.drafting.worker.session import drafting_params
from specq.protocol.bounds import MIN_TEMPERATURE
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.oracle import RULES
from specq.testing.random_steps import packed_logits, sampled_trees, sampling_params, split, steps
from specq.verification import STRATEGIES
from specq.verification.drafting import truncated_distributions
from specq.verification.judge import judge
from specq.verification.sampling import choose_tokens, target_probs
from tests.each import each
from tests.verification.steps import said

TINY = (0.99e-5, 1e-6, 1e-45, 1e-50, 5e-324)
ALLOWED = (MIN_TEMPERATURE, 1e-4, 100.0)
CUTS = ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 2**31 - 1, "top_p": 5e-324, "min_p": 5e-324})


@st.composite
def batches(draw, strategy, temperature):
    params = st.just(draw(sampling_params(strategy=strategy)))
    made = draw(st.lists(steps(params=params, tree=sampled_trees()), min_size=1, max_size=3))
    return [replace(step, params=replace(step.params, temperature=temperature)) for step in made]


def by_oracle(batch, logits):
    found = [RULES[step.params.strategy](step, rows) for step, rows in split(batch, logits)]
    return [(tuple(path), [int(token) for token in tokens]) for path, tokens in found]


@pytest.mark.usefixtures("way")
@each(("temperature", "strategy"), product(TINY, STRATEGIES))
@settings(max_examples=8)  # of each of several temperatures, and ways to judge
@given(data=st.data(), entropy=st.integers(0, 2**32), spread=st.sampled_from([1e-3, 1.0, 1e4, 1e30]))
def test_below_what_can_be_divided_by_all_is_as_at_zero(strategy, temperature, data, entropy, spread):
    """Under every strategy; at 1e-50, a float32 that is 0, `probabilistic` said the last token of the vocabulary."""
    batch = data.draw(batches(strategy, temperature))
    logits = packed_logits(batch, entropy) * spread
    at_zero = [replace(step, params=replace(step.params, temperature=0.0)) for step in batch]
    assert said(judge(batch, logits)) == by_oracle(at_zero, logits)


@pytest.mark.usefixtures("way")
@each(("temperature", "strategy"), product(ALLOWED, STRATEGIES))
@settings(max_examples=8)  # of each of several temperatures, and ways to judge
@given(data=st.data(), entropy=st.integers(0, 2**32), spread=st.sampled_from([1.0, 1e4]))
def test_at_the_limits_all_is_as_the_oracle_says(strategy, temperature, data, entropy, spread):
    batch = data.draw(batches(strategy, temperature))
    logits = packed_logits(batch, entropy) * spread
    with np.errstate(over="ignore"):
        assert said(judge(batch, logits)) == by_oracle(batch, logits)


@pytest.mark.usefixtures("way")
@each(("cuts", "temperature"), product(CUTS, [*TINY, *ALLOWED]))
def test_distributions_are_distributions_at_every_temperature(temperature, cuts):
    """Their sums are 1 for any cut, and the largest logit is as large as a model can make it."""
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.5], [0.0, -3e38, 3e38, 1.0], [5.0, -torch.inf, 5.0, 4.0]])
    params = [SamplingParams(temperature=temperature, seed=3, **cuts).validate()] * 3
    probs = target_probs(logits, params)
    assert probs.sum(1).tolist() == pytest.approx([1.0] * 3)
    assert set(probs[0].argmax(0, keepdim=True).tolist()) == {1}
    tokens = choose_tokens(logits, params, [7, 8, 9])
    assert all(probs[row, token] > 0 for row, token in enumerate(tokens.tolist()))


@each("temperature", TINY)
def test_drafters_draft_as_at_zero(temperature):
    """From their own temperature as well as from the job's."""
    job, own = SamplingParams(temperature=temperature), Speculation(candidate_temp=temperature)
    assert drafting_params(job, Speculation()).temperature == 0
    assert drafting_params(SamplingParams(temperature=1.0), own).temperature == 0
    ids, weights = truncated_distributions(torch.tensor([[1.0, 3.0, 2.9]]), [job])
    assert ids[weights > 0].tolist() == [1]


def test_what_stands_for_the_jobs_own_temperature_stays():
    assert Speculation(candidate_temp=-1.0).candidate_temp == -1
    assert SamplingParams(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
