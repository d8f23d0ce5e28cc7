"""The Triton kernels without a GPU: `TRITON_INTERPRET=1 pytest tests/verification/test_triton.py` where Triton is
installed."""

import gc
import os
import sys
import weakref
from itertools import product

import numpy as np
import pytest
import torch

from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import DraftDistributions, SessionStep, Tree
from specq.testing.oracle import RULES
from specq.testing.random_steps import check_against_naive
from specq.verification import cuda_paths, cuda_rows
from specq.verification.cuda_rows import CudaRows
from specq.verification.host_kernels import make_rows
from specq.verification.judge import judge
from specq.verification.target_rows import Edits
from specq.verification.torch_rows import TorchRows
from tests.each import each

pytestmark = [
    pytest.mark.skipif(
        not cuda_rows.is_available() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # it computes with the masked elements, too
]

UNIFORMS = [
    2.0**-33,
    0.21374,
    0.48613,
    0.90717,
    1 - 2.0**-33,
]  # of the draws; the first and last are the extremes that there are
NOTHING = np.zeros(0, np.int64)
SAMPLERS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.1},
]


def make_small(monkeypatch, lanes=32, **sizes):
    monkeypatch.setattr(cuda_paths, "LANES", lanes)
    for name, value in {"BLOCK": 16, "WIDE_BLOCK": 32, "ROOM": 8, "WIDE_ROOM": 64, "PROGRAMS": 16, **sizes}.items():
        monkeypatch.setattr(cuda_rows, name, value)


@pytest.fixture(params=[32, 16])
def by_kernels(request, monkeypatch):
    """Judge by the kernels: all down the drafted trees, and where there are lanes for small ones only."""
    make_small(monkeypatch, lanes=request.param)
    monkeypatch.setattr(sys.modules[judge.__module__], "target_rows", lambda rows: CudaRows(torch.from_numpy(rows)))


@each(
    ("vocab", "spread", "room"),
    product([5, 70, 300], [0.3, 2.0, 6.0], [{"ROOM": 2}, {"WIDE_ROOM": 16}, {"ROOM": 20, "WIDE_ROOM": 200}]),
)
def test_rows_get_the_tokens_and_distributions_of_torch(vocab, spread, room, monkeypatch):
    """With little room for what is likely, whole rows are looked at instead."""
    make_small(monkeypatch, **room)
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(0, spread, (len(SAMPLERS), vocab)).astype("f4"))
    logits = logits.round() if spread == 2.0 else logits
    rows = make_rows([SamplingParams(seed=i, **sampler) for i, sampler in enumerate(SAMPLERS)], range(len(SAMPLERS)))
    by_torch, by_triton = TorchRows(logits), CudaRows(logits)
    assert by_torch.own_tokens(rows)().tolist() == by_triton.own_tokens(rows)().tolist()
    warm, tokens = rows[1:], np.array([[0, vocab - 1, -1]] * (len(rows) - 1))
    (expected, probs), (distributions, found) = (
        way.distributions(warm)(np.arange(len(warm)), tokens) for way in (by_torch, by_triton)
    )
    assert np.array_equal(expected.found[:, :2], distributions.found[:, :2])
    assert found == pytest.approx(probs, rel=1e-6)
    assert distributions.entropies() == pytest.approx(expected.entropies(), rel=1e-5)


@each("sampler", SAMPLERS[1:])
def test_what_is_beside_a_nearly_certain_token_counts(sampler, monkeypatch):
    """300 tokens of 1e-9 each are most of the entropy, and would be lost in a sum that begins with 1."""
    make_small(monkeypatch)
    logits = torch.zeros(1, 300)
    logits[0, 7] = 20.0 * sampler["temperature"]
    rows = make_rows([SamplingParams(**sampler)], [0])
    (expected, _), (found, _) = (
        way(logits).distributions(rows)(NOTHING, NOTHING[:, None]) for way in (TorchRows, CudaRows)
    )
    assert found.entropies() == pytest.approx(expected.entropies(), rel=1e-5)


@each(("vocab", "max_splits"), product([1, 5, 64, 70, 300], [1, 3, 64]))
def test_draws_from_edited_distributions_are_those_of_torch(vocab, max_splits, monkeypatch):
    """Ties, tokens of logit -inf, edits of some tokens to nothing and to more; many tokens a chunk, and few."""
    make_small(monkeypatch, MAX_SPLITS=max_splits)
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 2, (len(SAMPLERS) - 1, vocab)).round().astype("f4"))
    logits[:, 1::7] = -torch.inf
    rows = make_rows([SamplingParams(seed=i, **sampler) for i, sampler in enumerate(SAMPLERS[1:])], range(len(logits)))
    by_torch, by_triton = TorchRows(logits), CudaRows(logits)
    which, tokens = np.arange(len(rows)).repeat(3), np.array([[0], [vocab - 1], [-1]] * len(rows))
    (_, probs), (distributions, found) = (way.distributions(rows)(which, tokens) for way in (by_torch, by_triton))
    assert found == pytest.approx(probs, rel=1e-6)
    count = min(vocab, 4)
    place = np.array([1, 3]).repeat(count)
    token_ids = np.concatenate([rng.permutation(vocab)[:count] for _ in range(2)])
    for edits in (Edits(*np.zeros((3, 0), np.int64)), Edits(place, token_ids, rng.choice([0.1, 0.6, 2.0], len(place)))):
        for uniform in UNIFORMS:
            order = np.arange(len(rows))[::-1].copy()
            drawn, hoped = (
                way.draw(distributions, order, edits, np.full(len(rows), uniform)).tolist()
                for way in (by_triton, by_torch)
            )
            assert drawn == hoped


def test_what_edits_leave_without_weight_is_never_drawn(monkeypatch):
    """One token is left, wherever it stands; where none is, any token is drawn, and no other memory is read."""
    make_small(monkeypatch)
    vocab = 70
    target = CudaRows(torch.zeros(1, vocab))
    found, _ = target.distributions(make_rows([SamplingParams(temperature=1.0)], [0]))(NOTHING, NOTHING[:, None])
    for left in (0, 31, 32, 63, 64, 69, None):
        others = np.array([token for token in range(vocab) if token != left])
        edits = Edits(np.zeros_like(others), others, np.zeros(len(others)))
        for uniform in UNIFORMS:
            drawn = target.draw(found, np.zeros(1, np.int64), edits, np.array([uniform])).tolist()
            assert drawn == [left] if left is not None else 0 <= drawn[0] < vocab


@each("temperature", [0.0, 0.8])
def test_own_tokens_of_some_rows_beside_their_distributions(temperature, monkeypatch):
    """Whether the distributions of these rows are known already or not, and of rows with T = 0 among others."""
    make_small(monkeypatch)
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, (6, 70)).astype("f4"))
    params = [
        SamplingParams(seed=i, temperature=temperature if i % 2 else 0.8, top_p=0.7 if i < 3 else 1.0) for i in range(6)
    ]
    rows, which = make_rows(params, range(6)), np.array([4, 1, 0, 5])
    expected = TorchRows(logits).own_tokens(rows)()[which].tolist()
    assert CudaRows(logits).own_tokens_among(rows)(which).tolist() == expected
    target = CudaRows(logits)
    warm = rows if temperature else make_rows([SamplingParams(temperature=1.0)] * 6, range(6))
    look_up = target.distributions(warm)
    own = target.own_tokens_among(rows)
    _, probs = look_up(np.arange(6), np.zeros((6, 1), np.int64))
    _, hoped = TorchRows(logits).distributions(warm)(np.arange(6), np.zeros((6, 1), np.int64))
    assert probs == pytest.approx(hoped, rel=1e-6)
    assert own(which).tolist() == expected


def test_what_has_no_largest_logit_is_refused():
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full((2, 40), bad if bad == -torch.inf else 0.0)
        logits[1, 7] = bad
        rows = make_rows([SamplingParams(temperature=t, top_p=0.9) for t in (0.0, 1.0)], [0, 0])
        for which in (rows[:1], rows[1:]):
            which["logit_row"] = 1
            with pytest.raises(EngineError, match="not finite"):
                CudaRows(logits).own_tokens(which)()


@pytest.mark.usefixtures("by_kernels")
@each("names", [["probabilistic"], ["threshold", "typical"], list(RULES)])
def test_trees_are_judged_as_the_oracle_does_one_by_one(names):
    """At T = 0 and above, with and without cuts and draft distributions; some sessions without nodes."""
    check_against_naive({name: RULES[name] for name in names}, max_examples=6)


def bushy(count, strategy):
    """Steps with four siblings drawn from one distribution, point masses beside them, and the like below the first of
    them."""
    rng, steps = np.random.default_rng(8), []
    for seed in range(count):
        ids, weights = (
            np.array([rng.permutation(12)[:6] for _ in range(2)]),
            np.maximum(rng.integers(1, 65536, (2, 6)) >> rng.integers(0, 12, (2, 6)), 1),
        )
        drawn = [rng.choice(own, 4, replace=False, p=of / of.sum()) for own, of in zip(ids, weights, strict=True)]
        points = [rng.choice(np.setdiff1d(np.arange(12), own), 2, replace=False) for own in drawn]
        tokens = np.concatenate([points[0][:1], drawn[0], points[0][1:], drawn[1], points[1]])
        parents, of_nodes = np.array([-1] * 6 + [1] * 6), np.array([-1, 0, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1])
        distributions = DraftDistributions(*(a.astype(t) for a, t in ((ids, "i4"), (weights, "u2"), (of_nodes, "i4"))))
        tree = Tree(tokens.astype("i4"), parents.astype("i4"), np.zeros(12, "f4"), distributions)
        params = SamplingParams(strategy=strategy, seed=seed, threshold=0.05, **SAMPLERS[1 + seed % 5])
        steps.append(SessionStep(seed, 5, np.array([7], np.int32), params, tree))
    return steps


@each("strategy", ["probabilistic", "threshold", "typical"])
def test_many_siblings_are_judged_as_on_a_cpu(strategy, monkeypatch):
    make_small(monkeypatch)
    steps = bushy(24, strategy)
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (24 * 13, 12)).astype("f4"))
    expected = [(j.path, j.token_ids.tolist()) for j in judge(steps, logits)]
    assert {len(path) for path, _ in expected} == {0, 1, 2}
    monkeypatch.setattr(sys.modules[judge.__module__], "target_rows", lambda rows: CudaRows(torch.from_numpy(rows)))
    assert [(j.path, j.token_ids.tolist()) for j in judge(steps, logits)] == expected


@pytest.mark.usefixtures("by_kernels")
@each(("strategy", "bad"), product(["probabilistic", "threshold", "typical"], [torch.nan, torch.inf, -torch.inf]))
def test_a_tree_with_a_row_without_numbers_is_refused(strategy, bad):
    params, nodes = SamplingParams(temperature=0.8, strategy=strategy), np.array([-1, 0], np.int32)
    tree = Tree(np.array([1, 2], np.int32), nodes, np.zeros(2, np.float32))
    steps = [SessionStep(i, 5, np.array([7], np.int32), params, tree) for i in range(2)]
    for row in range(6):
        logits = torch.zeros(6, 40)
        logits[row] = bad
        with pytest.raises(EngineError, match="not finite"):
            judge(steps, logits)


@each("sampler", SAMPLERS[1:])
def test_logits_are_freed_with_their_last_user(sampler, monkeypatch):
    """Not with the next collection of garbage: with 152k tokens each step's are tens of megabytes of a GPU."""
    make_small(monkeypatch)
    logits = torch.zeros(2, 70)
    rows = make_rows([SamplingParams(**sampler)] * 2, range(2))
    gc.disable()
    try:
        target = CudaRows(logits)
        own, look_up = target.own_tokens(rows), target.distributions(rows)
        own()
        look_up(np.arange(2), np.zeros((2, 1), np.int64))
        kept = weakref.ref(target)
        del target, own, look_up
        assert kept() is None
    finally:
        gc.enable()
