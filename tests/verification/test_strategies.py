"""Every strategy of the table: what all must keep, and what each is, against the oracle over random trees."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep
from specq.testing import oracle
from specq.testing.conformance.strategies import CHI2, StrategyConformance, chi2_over_seeds
from specq.testing.random_steps import check_against_naive, packed_logits
from specq.verification import STRATEGIES, step_batch, strategy
from specq.verification import drafting as draws
from specq.verification.judge import judge
from specq.verification.noise import Domain
from tests.each import each
from tests.verification.steps import said, tree_of


def test_each_strategy_has_an_oracle():
    assert set(oracle.RULES) == set(STRATEGIES)


@pytest.mark.usefixtures("way")
def test_mixed_batches_are_judged_as_the_oracle_does_one_by_one():
    check_against_naive(oracle.RULES)


@pytest.mark.parametrize("name", STRATEGIES)
class TestConformance(StrategyConformance):
    """Each of the table."""


def test_losslessness_is_marked():
    warm, cold = SamplingParams(temperature=1.0), SamplingParams()
    assert [name for name in STRATEGIES if strategy(name).is_lossless(warm)] == ["deterministic", "probabilistic"]
    assert [name for name in STRATEGIES if not strategy(name).is_lossless(cold)] == ["threshold", "typical"]


def test_traits():
    """What the broker, drafters and engines ask instead of names."""
    rules = {name: strategy(name) for name in STRATEGIES}
    assert [name for name, rule in rules.items() if not rule.uses_drafts] == ["greedy"]
    assert [name for name, rule in rules.items() if rule.takes_distributions] == ["probabilistic"]
    assert [name for name, rule in rules.items() if rule.stops_at_accepted] == ["probabilistic"]
    warm, cold = SamplingParams(temperature=0.7), SamplingParams()
    assert [rules["probabilistic"].samples_drafts(params) for params in (warm, cold)] == [True, False]
    assert rules["threshold"].judging_temperature(cold) == 1.0
    assert [name for name, rule in rules.items() if rule.judging_temperature(warm) != 0.7] == ["greedy"]


def test_own_parameters_are_fields_of_one_strategy_each():
    names = [parameter for name in STRATEGIES for parameter in strategy(name).parameters]
    assert names == ["threshold", "typical_eps", "typical_delta"]
    assert set(names) <= {field.name for field in fields(SamplingParams)}


@pytest.mark.usefixtures("way")
@each("name", ["deterministic", "probabilistic"])
def test_mutant_noise_keyed_by_batch_index(name, monkeypatch):
    """The independence of the batch, which the conformance test asks for, is lost."""
    params = SamplingParams(strategy=name, temperature=2.0)
    batch = [SessionStep(i, 3, np.array([0], np.int32), replace(params, seed=i)) for i in range(20)]
    logits = packed_logits(batch, 1)

    def differs():
        alone = [judge([step], logits[i : i + 1])[0] for i, step in enumerate(batch)]
        return said(judge(batch, logits)) != said(alone)

    def by_index(*of):
        rows = exact(*of)
        rows["seed"] = np.arange(len(rows))
        return rows

    assert not differs()
    exact = step_batch.make_rows
    monkeypatch.setattr(step_batch, "make_rows", by_index)
    assert differs()


@each("name", ["threshold", "typical", "greedy"])
def test_a_lossy_one_does_not_follow_the_targets_distribution(name):
    assert chi2_over_seeds(name) > CHI2


def test_accept_and_residual_draws_are_of_different_domains(monkeypatch):
    """With one domain for both, and the token left out of the key, a rejection would foretell the residual."""
    row = np.log(np.full(4, 0.25, np.float32))
    params = SamplingParams(strategy="probabilistic", temperature=1.0)

    def chi2():
        batch = [SessionStep(i, 3, np.zeros(1, np.int32), replace(params, seed=i), tree_of([0])) for i in range(4000)]
        emitted = [j.token_ids[0] for j in judge(batch, torch.from_numpy(np.tile(row, (8000, 1))))]
        return ((np.bincount(emitted, minlength=4) - 1000) ** 2 / 1000).sum()

    assert chi2() < 16.3
    exact = draws.uniforms
    monkeypatch.setattr(draws, "uniforms", lambda seeds, positions, ids, _: exact(seeds, positions, ids, Domain.ACCEPT))
    assert chi2() > 100


class TestLossyBias:
    """The bias is real, and of the stated kind: a drafted token above the bar is emitted for certain."""

    ROW = np.log(np.array([0.6, 0.25, 0.1, 0.05], np.float32))

    def emitted(self, token, **params):
        of_seeds = [SamplingParams(temperature=1.0, seed=i, **params) for i in range(2000)]
        batch = [SessionStep(i, 3, np.zeros(1, np.int32), own, tree_of([token])) for i, own in enumerate(of_seeds)]
        tokens = [j.token_ids[0] for j in judge(batch, torch.from_numpy(np.tile(self.ROW, (4000, 1))))]
        return np.bincount(tokens, minlength=4) / 2000

    def test_above_the_bar_for_certain_below_it_never(self):
        """The bar of `typical` is min(0.09, 0.3 * exp(-1.03)) = 0.09; with a larger epsilon 0.107."""
        for params in ({"strategy": "threshold"}, {"strategy": "typical"}, {"strategy": "typical", "typical_eps": 1.0}):
            assert self.emitted(1, **params).tolist() == [0, 1, 0, 0]
            assert self.emitted(3, **params) == pytest.approx(np.exp(self.ROW), abs=0.04)

    def test_the_bars_parameters_are_honoured(self):
        assert self.emitted(1, strategy="threshold", threshold=0.3)[1] < 0.4
        assert self.emitted(3, strategy="threshold", threshold=0.04)[3] == 1
        assert self.emitted(3, strategy="typical", typical_eps=0.04)[3] == 1
        assert self.emitted(2, strategy="typical", typical_eps=1.0, typical_delta=1.0)[2] < 0.3
        assert self.emitted(2, strategy="typical", typical_eps=1.0, typical_delta=0.25)[2] == 1

    def test_lossless_strategies_stay_unbiased_and_greedy_returns_the_top_token(self):
        assert self.emitted(1, strategy="greedy").tolist() == [1, 0, 0, 0]
        for name in ("deterministic", "probabilistic"):
            assert self.emitted(1, strategy=name) == pytest.approx(np.exp(self.ROW), abs=0.04)


def test_threshold_at_temperature_zero_lets_plausible_drafts_through():
    step = SessionStep(1, 3, np.zeros(1, np.int32), SamplingParams(strategy="threshold"), tree_of([1]))
    logits = torch.from_numpy(np.tile(TestLossyBias.ROW, (2, 1)))
    assert judge([step], logits)[0].token_ids.tolist() == [1, 0]
    assert judge([replace(step, params=SamplingParams(strategy="typical"))], logits)[0].token_ids.tolist() == [0]
