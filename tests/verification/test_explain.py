"""What `--verbose` says of each drafted node: the numbers that the strategy judged by, and what came of it."""

from dataclasses import replace

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st

from specq.config.sections import TargetConfig
from specq.engines.native import steps as engine_steps
from specq.engines.torch.engine import TorchEngine
from specq.processes.target import build_verifier
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, DraftDistributions, SessionStep
from specq.testing import oracle
from specq.testing.checkpoints import make_checkpoint
from specq.testing.random_steps import packed_logits, sampled_trees, sampling_params, split, steps
from specq.verification import STRATEGIES
from specq.verification.explain import explain, log_decisions
from specq.verification.judge import judge
from tests.verification.steps import tree_of

DISTRIBUTION = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def a_step(params, tokens, parents, distributions=None):
    return SessionStep(7, 10, np.array([1], np.int32), params, tree_of(tokens, parents, distributions))


def decisions(step, logits=None):
    rows = DISTRIBUTION.tile(step.num_judged_rows, 1) if logits is None else logits
    return list(explain([step], rows, judge([step], rows)))


def test_deterministic_at_temperature_zero():
    """The distribution is a point mass on token 0; positions count from the committed context."""
    step = a_step(SamplingParams(), [0, 2, 0, 1, 3], [-1, -1, 0, 2, 1])
    found = decisions(step)
    assert {d.session for d in found} == {7}
    assert [(d.position, d.token) for d in found] == [(11, 0), (11, 2), (12, 0), (13, 1), (12, 3)]
    assert [d.verdict for d in found] == ["accepted", "rejected", "accepted", "rejected", "not reached"]
    assert [d.target_prob for d in found] == [1, 0, 1, 0, 0]
    assert [d.draft_prob for d in found] == [1] * 5


def test_probabilities_are_those_after_bias_temperature_and_cuts():
    params = SamplingParams(temperature=0.5, top_k=2, logit_bias=((1, float(np.log(5 / 3))),))  # 0.5, 0.5 of the kept
    found = decisions(a_step(params, [0, 1, 2], [-1, -1, -1]))
    assert [d.target_prob for d in found] == pytest.approx([0.5, 0.5, 0])


def test_threshold_at_temperature_zero_judges_the_softmax():
    found = decisions(a_step(SamplingParams(strategy="threshold"), [1, 3], [-1, 0]))
    assert [d.target_prob for d in found] == pytest.approx([0.3, 0.05])
    assert [d.verdict for d in found] == ["accepted", "rejected"]


def test_greedy_looks_at_no_node():
    found = decisions(a_step(SamplingParams(strategy="greedy", temperature=1.0), [0, 1], [-1, -1]))
    assert [(d.verdict, d.target_prob) for d in found] == [("not reached", 1), ("not reached", 0)]


def test_draft_probabilities_are_given_the_earlier_siblings():
    distributions = DraftDistributions(
        np.array([[2, 0, 3]], np.int32), np.array([[6, 3, 1]], np.uint16), np.array([0, 0, -1], np.int32)
    )
    params = SamplingParams(strategy="probabilistic", temperature=1.0)
    found = decisions(a_step(params, [2, 0, 1], [-1, -1, -1], distributions))
    assert [d.draft_prob for d in found] == pytest.approx([0.6, 0.75, 1])
    assert [d.target_prob for d in found] == pytest.approx([0.15, 0.5, 0.3])


def test_probabilistic_does_not_reach_the_younger_siblings_of_an_accepted_one():
    params = SamplingParams(strategy="probabilistic", temperature=1.0)
    verdicts = set()
    for seed in range(60):
        found = decisions(a_step(replace(params, seed=seed), [0, 1], [-1, -1]))
        verdicts.add(tuple(d.verdict for d in found))
    assert verdicts == {("accepted", "not reached"), ("rejected", "accepted"), ("rejected", "rejected")}


def steps_of(strategy):
    return steps(params=sampling_params(strategy=strategy), tree=sampled_trees())


@given(st.lists(st.sampled_from(sorted(STRATEGIES)).flatmap(steps_of), max_size=4), st.integers(0, 2**32))
def test_all_strategies_together(batch, entropy):
    logits = packed_logits(batch, entropy)
    judgements = judge(batch, logits)
    found = iter(explain(batch, logits, judgements))
    for (step, rows), judgement in zip(split(batch, logits), judgements, strict=True):
        own = [next(found) for _ in range(step.tree.num_nodes)]
        assert [i for i, d in enumerate(own) if d.verdict == "accepted"] == sorted(judgement.path)
        warm = step.params.strategy == "threshold" and step.params.temperature == 0
        params = replace(step.params, temperature=1.0) if warm else step.params
        params = replace(params, temperature=0.0) if params.strategy == "greedy" else params
        for decision, parent, token in zip(own, step.tree.parents, step.tree.token_ids, strict=True):
            assert decision.target_prob == pytest.approx(oracle.distribution(rows[parent + 1], params)[token], abs=1e-9)
    assert next(found, None) is None


def test_what_is_logged():
    batch = [a_step(SamplingParams(), [0, 1], [-1, 0]), replace(a_step(SamplingParams(), [], []), judged=False)]
    logits = DISTRIBUTION.tile(3, 1)
    with structlog.testing.capture_logs() as events:
        log_decisions(batch, logits, judge(batch, logits))
    expected = {"event": "node_judged", "log_level": "info", "session": 7, "draft_prob": 1.0}
    assert events == [
        expected | {"position": 11, "token": 0, "target_prob": 1.0, "verdict": "accepted"},
        expected | {"position": 12, "token": 1, "target_prob": 0.0, "verdict": "rejected"},
    ]
    with structlog.testing.capture_logs() as events:
        log_decisions([batch[1]], logits[:0], [])
        plain = [replace(batch[0], tree=NO_TREE)]
        log_decisions(plain, logits[:1], judge(plain, logits[:1]))
    assert events == []


def step_once(engine):
    context = np.array([5, 6], np.int32)
    engine.open(3, context)
    step = SessionStep(3, 0, context, SamplingParams(), tree_of([1, 2], [-1, -1]))
    with structlog.testing.capture_logs() as events:
        [judgement] = engine.step([step]).judgements
    return judgement, [event for event in events if event["event"] == "node_judged"]


@pytest.mark.usefixtures("own_cache")
def test_the_engine_explains_only_where_it_is_asked_to(tmp_path, monkeypatch):
    directory = str(make_checkpoint("llama", tmp_path))
    judgement, events = step_once(TorchEngine(directory, device="cpu", verbose=True))
    assert [(event["session"], event["position"], event["token"]) for event in events] == [(3, 2, 1), (3, 2, 2)]
    assert [event["verdict"] == "accepted" for event in events] == [0 in judgement.path, 1 in judgement.path]

    def never(*_):
        raise AssertionError("nothing is to be computed where --verbose is not given")

    monkeypatch.setattr(engine_steps, "log_decisions", never)
    assert step_once(TorchEngine(directory, device="cpu"))[1] == []
    assert TorchEngine(directory, device="cpu", verbose=True).step_times([3])[0] > 0


def test_the_option_reaches_the_engine(tmp_path):
    model = str(make_checkpoint("llama", tmp_path))
    for verbose in (False, True):
        config = TargetConfig(model=model, device="cpu", max_step_rows=1, verbose=verbose)
        assert build_verifier(config, "t").engine._verbose is verbose
