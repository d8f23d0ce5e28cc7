"""The conformance suite of strategies, and of lossless strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specq.protocol import NO_TREE, EngineError, SamplingParams, SessionStep, Tree
from specq.testing.exact import ExactWorld, error, point, sampled
from specq.testing.random_steps import packed_logits, params_of, sampled_trees, split, steps
from specq.verification import strategy
from specq.verification.judge import judge

WARM = SamplingParams(temperature=1.0)
CHI2 = 16.3  # p = 0.001 at 3 degrees of freedom

# For each plan: the draft, and the number of compared tokens.
PLANS = {
    "nothing": ((), 1),
    "one": ((sampled(),), 2),
    "chain": ((sampled(sampled()),), 3),
    "two candidates": ((sampled(), sampled()), 2),
    "three candidates": ((sampled(), sampled(), sampled()), 2),
    "tree": ((sampled(sampled()), sampled(sampled())), 3),
    "point masses": ((point(point()), point()), 3),
    "mixed siblings": ((point(), sampled()), 2),
    "mixed chain": ((sampled(point()), point(sampled())), 3),
}
CUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 2},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}

SOME = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class StrategyConformance:
    """Needs the fixture `name`: the name of the strategy."""

    @SOME
    @given(data=st.data(), entropy=st.integers(0, 2**32))
    def test_a_judgement_does_not_depend_on_its_batch(self, name: str, data: st.DataObject, entropy: int) -> None:
        batch = data.draw(st.lists(steps(params=params_of((name,)), tree=sampled_trees()), max_size=4))
        logits = packed_logits(batch, entropy)
        alone = [judge([step], torch.from_numpy(rows)) for step, rows in split(batch, logits)]
        together = judge(batch, logits)
        assert [(j.path, j.token_ids.tolist()) for [j] in alone] == [(j.path, j.token_ids.tolist()) for j in together]

    @SOME
    @given(data=st.data(), entropy=st.integers(0, 2**32))
    def test_the_path_is_one_and_its_tokens_are_emitted(self, name: str, data: st.DataObject, entropy: int) -> None:
        step = data.draw(steps(params=params_of((name,)), tree=sampled_trees()))
        for judgement in judge([step], packed_logits([step], entropy)):
            parents = step.tree.parents[list(judgement.path)].tolist()
            assert parents == [-1, *judgement.path][: len(parents)]
            assert judgement.token_ids.dtype == np.int32
            count = len(judgement.path)
            assert judgement.token_ids[:count].tolist() == step.tree.token_ids[list(judgement.path)].tolist()
            assert len(judgement.token_ids) == count + 1

    def test_a_session_without_nodes_is_plain_decoding(self, name: str) -> None:
        params = SamplingParams(strategy=name)
        step = SessionStep(1, 5, np.array([3], np.int32), params, NO_TREE)
        [judgement] = judge([step], torch.tensor([[0.0, 3.0, 1.0]]))
        assert judgement.path == ()
        assert judgement.token_ids.tolist() == [1]

    @pytest.mark.parametrize("cuts", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
    @pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
    def test_logits_that_are_no_numbers_raise(self, name: str, cuts: dict[str, Any], bad: float) -> None:
        step = SessionStep(1, 5, np.array([3], np.int32), SamplingParams(strategy=name, **cuts))
        with pytest.raises(EngineError, match="not finite numbers"):
            judge([step, step], torch.stack([torch.zeros(6), torch.full((6,), bad)]))

    def test_a_lossless_one_follows_the_targets_distribution_over_seeds(self, name: str) -> None:
        """With the real draws, for any drafts."""
        if not strategy(name).is_lossless(WARM):
            pytest.skip("it is lossy")
        assert chi2_over_seeds(name) < CHI2


class ExactConformance:
    """For a lossless strategy that takes all its random numbers from `draws`. Needs the fixture `name`."""

    @pytest.mark.parametrize("plan", PLANS)
    @pytest.mark.parametrize("cuts", CUTS)
    def test_the_emitted_distribution_is_the_targets(self, name: str, plan: str, cuts: str) -> None:
        params = replace(WARM, strategy=name, **CUTS[cuts])
        world = ExactWorld(sum(map(ord, plan + cuts)), params=params)
        assert error(world, *PLANS[plan]) < 1e-9


def chi2_over_seeds(name: str, count: int = 4000) -> float:
    """Return the chi-squared distance of first tokens from the target's distribution.

    There are four tokens, and the second is drafted.
    """
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    drafted = Tree(np.array([1], np.int32), np.array([-1], np.int32), np.zeros(1, np.float32))
    params = [replace(WARM, strategy=name, seed=seed) for seed in range(count)]
    batch = [SessionStep(i, 3, np.array([0], np.int32), own, drafted) for i, own in enumerate(params)]
    emitted = [j.token_ids[0] for j in judge(batch, torch.from_numpy(np.tile(row, (2 * count, 1))))]
    expected = count * np.exp(row)
    return float(((np.bincount(emitted, minlength=4) - expected) ** 2 / expected).sum())
