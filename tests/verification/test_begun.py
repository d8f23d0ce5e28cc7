"""Judging in two halves says what judging at once does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep
from specq.testing.random_steps import VOCAB, packed_logits, steps
from specq.verification import STRATEGIES
from specq.verification.begun import begin
from specq.verification.judge import judge_each
from specq.verification.judgements import Judgements
from tests.each import each
from tests.verification.begun_rows import begun_rows, check_alike
from tests.verification.steps import tree_of
from tests.verification.test_processors import Case, cases


def said(judgements: Judgements) -> list[tuple[object, ...]]:
    return [(one.session_id, one.path, one.token_ids.tolist(), one.fault is not None) for one in judgements]


def judged_both_ways(batch: list[SessionStep], logits: torch.Tensor) -> tuple[list[object], list[object], bool]:
    """Return what is said in two halves and at once, and whether the first half chose tokens."""
    with begun_rows():
        judging = begin(batch, logits)
    return said(judging.finish()), said(judge_each(batch, logits)), judging.begun is not None


@settings(max_examples=300, deadline=None)
@given(st.lists(steps(), min_size=1, max_size=5), st.integers(0, 2**32))
def test_drafts_are_judged_as_at_once(batch: list[SessionStep], seed: int) -> None:
    """Trees and plain steps, at every temperature, with top-k, top-p and min-p; some steps are not judged."""
    batch = [replace(step, session_id=i) for i, step in enumerate(batch)]
    in_halves, at_once, is_begun = judged_both_ways(batch, packed_logits(batch, seed))
    assert in_halves == at_once
    assert is_begun == any(step.judged for step in batch)


@settings(max_examples=200, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=5), st.integers(0, 2**32))
def test_async_judging_of_plain_steps_equals_sync_for_all_options(found: list[Case], seed: int) -> None:
    """Penalties, bias, bad tokens, min_tokens and log-probabilities are the device's work, too."""
    batch = [replace(case.step, session_id=i, tree=NO_TREE) for i, case in enumerate(found)]
    logits = packed_logits(batch, seed)
    before = logits.clone()
    with begun_rows():
        judging = begin(batch, logits)
    assert torch.equal(logits, before)
    assert judging.tokens is not None
    at_once, in_halves = judge_each(batch, logits), judging.finish()
    assert said(in_halves) == said(at_once)
    check_alike(in_halves, at_once)
    assert at_once.logprobs.keys() == {i for i, s in enumerate(batch) if s.params.logprobs >= 0}


@each(("bad", "temperature"), product([torch.nan, torch.inf, -torch.inf], [0.0, 0.8]))
def test_a_row_without_a_token_harms_its_session_alone_and_only_if_it_is_reached(
    bad: float, temperature: float
) -> None:
    """The row of a rejected node is discarded."""
    batch = _chains(SamplingParams(temperature=temperature, seed=4))
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (12, VOCAB)).astype("f4"))
    accepted = said(judge_each(batch, logits))
    for row in range(12):
        spoilt = logits.clone()
        spoilt[row] = bad
        in_halves, at_once, is_begun = judged_both_ways(batch, spoilt)
        assert is_begun
        assert in_halves == at_once
        others = [i for i in range(3) if i != row // 4]
        assert [in_halves[i] for i in others] == [accepted[i] for i in others]


def _chains(params: SamplingParams) -> list[SessionStep]:
    return [SessionStep(i, 5, np.array([7], np.int32), params, tree_of([1, 2, 3])) for i in range(3)]


@each("strategy", [name for name in STRATEGIES if name != "deterministic"])
def test_strategies_that_need_more_wait_for_the_host(strategy: str) -> None:
    """With drafts; without, their own tokens may do."""
    alike = _chains(SamplingParams(temperature=0.8, strategy=strategy))
    for batch in (alike, [*_chains(SamplingParams())[:2], alike[2]]):
        in_halves, at_once, is_begun = judged_both_ways(batch, packed_logits(batch, 3))
        assert in_halves == at_once
        assert not is_begun
