"""The fused path against transformers and the generic path: on a GPU, or under Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/engines/test_fused.py      # without a GPU; slow
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from specq.drafting import Drafter, Expansion
from specq.drafting.draft_model.chain_model import ChainModel
from specq.drafting.draft_model.drafter import DraftModel
from specq.engines.native import LoadedModel
from specq.engines.native.rows import PackedRows, RowTap, pack_steps
from specq.engines.torch import loading
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.generic import GenericForward
from specq.protocol.params import SamplingParams
from specq.protocol.step_output import FINAL, Tap
from specq.protocol.types import ScratchRows, SessionStep, Tree
from specq.testing.checkpoints import (
    CONFIGS,
    VOCAB,
    load_reference,
    make_checkpoint,
    path_tokens,
    random_tokens,
    random_tree,
    reference_logits,
)
from specq.testing.toy_drafters import commit_one
from tests.devices import HAS_CUDA

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not HAS_CUDA and not INTERPRETED, reason="no GPU, and TRITON_INTERPRET is not 1"),
    pytest.mark.timeout(600),
    # the interpreter computes with NumPy, which speaks of what wraps and overflows
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
KINDS = ("llama", "qwen2", "qwen3", "wide-heads") if HAS_CUDA else ("qwen2", "qwen3", "wide-heads")
WIDE_HEADS = {**CONFIGS["llama"], "head_dim": 64, "num_hidden_layers": 2}
TOLERANCE = 2e-4
# The interpreter has no bfloat16 products.
HALVES = (torch.float16, torch.bfloat16) if HAS_CUDA else (torch.float16,)


@pytest.fixture(params=KINDS, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("wide-heads", tmp_path_factory.mktemp("wide_heads"))


def save(kind: str, directory: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "wide-heads", WIDE_HEADS)
        return make_checkpoint(kind, directory)


def load_fused(directory: Path, dtype: torch.dtype = torch.float32, slots: int = 2048, **options: Any) -> LoadedModel:
    """Load a checkpoint with the fused path, on a CPU too."""
    from specq.engines.torch.cuda.forward import FusedForward

    network = loading._load_network(directory, DEVICE, dtype)
    forward = FusedForward(network, loading._make_kv(network, slots), **options)
    return loading.loaded_model(network, directory, forward, "fused")


def load_generic(directory: Path, dtype: torch.dtype = torch.float32, slots: int = 2048) -> GenericForward:
    network = loading._load_network(directory, DEVICE, dtype)
    return GenericForward(network, loading._make_kv(network, slots))


class Texts:
    """Sessions with slots of their own: packs steps for any forward, one step after the other."""

    def __init__(self, seed: int, num_sessions: int, num_slots: int = 2048) -> None:
        self.rng = np.random.default_rng(seed)
        self.free = self.rng.permutation(num_slots).astype(np.int32).tolist()
        self.tables: list[list[int]] = [[] for _ in range(num_sessions)]
        self.texts: list[list[int]] = [[] for _ in range(num_sessions)]

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def rows(self, parts: list[tuple[int, int, int, bool]]) -> tuple[PackedRows, list[SessionStep]]:
        """Pack (session, new tokens, tree nodes, judged) of some sessions; the new tokens become their text."""
        steps, slots, tables = [], [], []
        for session, num_tokens, num_nodes, judged in parts:
            tokens = random_tokens(self.rng, num_tokens)
            tree = random_tree(self.rng, num_nodes)
            start = len(self.texts[session])
            steps.append(SessionStep(session, start, tokens, SamplingParams(), tree, judged))
            own = self.take(num_tokens)
            self.tables[session] += own
            self.texts[session] += tokens.tolist()
            slots += own + self.take(num_nodes)
            tables.append(np.array(self.tables[session], np.int32))
        return pack_steps(steps, np.array(slots, np.int32), tables), steps


# One row; a few rows; a wide batch of everything; a tree after it; a prefill chunk without logits; rows of one session
# against a context of several chunks.
SCHEDULE = [
    [(0, 1, 0, True)],
    [(0, 9, 0, True)],
    [(1, 30, 0, False), (0, 1, 7, True), (2, 2, 0, True)],
    [(1, 1, 9, True)],
    [(1, 1, 0, True), (0, 1, 0, True)],
    [(1, 14, 0, False)],
    [(1, 100, 0, False)],
    [(1, 1, 4, True)],
    [(1, 1, 0, True)],
]


TOLERANCES = {torch.float32: TOLERANCE, torch.float16: 0.05, torch.bfloat16: 0.4}


def check_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_logits_and_hidden_states_equal_the_generic_path(checkpoint, dtype):
    ours, theirs = load_fused(checkpoint, dtype).forward, load_generic(checkpoint, dtype)
    texts = Texts(0, 3)
    for parts in SCHEDULE:
        rows, _ = texts.rows(parts)
        found, expected = ours(rows), theirs(rows)
        assert found.logits.shape == expected.logits.shape
        for a, b in zip(found[:2], expected[:2], strict=True):
            check_close(a, b, TOLERANCES[dtype])
    used = [slot for table in texts.tables for slot in table]
    for a, b in ((ours.kv.keys, theirs.kv.keys), (ours.kv.values, theirs.kv.values)):
        check_close(a[:, :, used], b[:, :, used], TOLERANCE if dtype == torch.float32 else 0.4)


def test_logits_of_a_random_tree_equal_transformers_on_each_path(wide_heads):
    forward, reference, texts = load_fused(wide_heads).forward, load_reference(wide_heads), Texts(1, 1)
    forward(texts.rows([(0, 15, 0, False)])[0])
    rows, (step,) = texts.rows([(0, 1, 12, True)])
    logits = forward(rows).logits.cpu()
    for row in range(13):
        check_close(logits[row], reference_logits(reference, texts.texts[0] + path_tokens(step.tree, row - 1)))


def test_padding_writes_no_keys_and_values(wide_heads):
    forward = load_fused(wide_heads, slots=64).forward
    forward.kv.keys.fill_(7)
    forward.kv.values.fill_(7)
    texts = Texts(2, 1, 64)
    forward(texts.rows([(0, 3, 0, True)])[0])  # a graph of 16 rows
    unused = texts.free
    assert (forward.kv.keys[:, :, unused] == 7).all()
    assert (forward.kv.values[:, :, unused] == 7).all()
    assert (forward.kv.keys[:, :, texts.tables[0]] != 7).any()


LAYERS = (1, FINAL, 0)


def tap_of(rows: PackedRows) -> RowTap:
    """All rows but the first, if there are others."""
    return RowTap(LAYERS, np.arange(min(1, rows.num_rows - 1), rows.num_rows, dtype=np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_tapped_hidden_states_equal_the_generic_path(wide_heads, dtype):
    ours, theirs, texts = load_fused(wide_heads, dtype).forward, load_generic(wide_heads, dtype), Texts(5, 3)
    for parts in SCHEDULE:
        rows, _ = texts.rows(parts)
        found, expected = ours(rows, tap_of(rows)).tapped, theirs(rows, tap_of(rows)).tapped
        assert found.dtype == dtype
        check_close(found, expected, TOLERANCES[dtype])


def test_a_tap_changes_no_bits_of_logits_keys_and_values(wide_heads):
    """In narrow and wide batches and beyond the largest; and what it gave is not written to again."""
    tapped, plain, texts = load_fused(wide_heads).forward, load_fused(wide_heads).forward, Texts(6, 3)
    kept = []
    for parts in SCHEDULE:
        rows, _ = texts.rows(parts)
        found, expected = tapped(rows, tap_of(rows)), plain(rows)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.hidden, expected.hidden)
        kept.append((found.tapped, found.tapped.clone()))
    used = [slot for table in texts.tables for slot in table]
    for a, b in ((tapped.kv.keys, plain.kv.keys), (tapped.kv.values, plain.kv.values)):
        assert torch.equal(a[:, :, used], b[:, :, used])
    assert all(torch.equal(now, then) for now, then in kept)


@pytest.mark.parametrize("is_tapped", [False, True])
def test_steps_beyond_the_largest_graph_and_lists_beyond_the_room(wide_heads, monkeypatch, is_tapped):
    """Both run in memory of their own, with the same logits and hidden states."""
    from specq.engines.torch.cuda import forward as fused

    monkeypatch.setattr(fused, "SIZES", (1, 16, 32))
    monkeypatch.setattr(fused, "LIST_ROOM", 64)
    ours, theirs, texts = load_fused(wide_heads).forward, load_generic(wide_heads), Texts(3, 2)
    for parts in ([(0, 40, 0, True)], [(0, 20, 0, False), (1, 2, 0, True)], [(0, 1, 3, True)]):
        rows, _ = texts.rows(parts)
        found, expected = (forward(rows, tap_of(rows) if is_tapped else None) for forward in (ours, theirs))
        check_close(found.logits, expected.logits)
        if is_tapped:
            check_close(found.tapped, expected.tapped)


def test_scratch_rows_of_an_engine_equal_the_generic_path(wide_heads):
    """Below the context, nodes and each other; narrow, and wide through many sessions; with a tap."""
    loaded, generic = load_fused(wide_heads), load_generic(wide_heads)
    engines = [TorchEngine(LoadedModel(loaded.info, forward)) for forward in (loaded.forward, generic)]
    rng = np.random.default_rng(8)
    for num_sessions in (1, 2, 5):
        steps = []
        for i in range(num_sessions):
            context = random_tokens(rng, 9 + i)
            parents, offsets = np.array([-1, 4, 5, 1, 7, -1, 3], np.int32), np.array([0, 1, 2, 2, 5, 7, 3], np.int32)
            scratch = ScratchRows(random_tokens(rng, 7), parents, len(context) + offsets)
            steps.append(SessionStep(i, 0, context, SamplingParams(), random_tree(rng, 4), scratch=scratch))
            for engine in engines:
                engine.open(i, context)
        found, expected = (engine.step(steps, Tap(LAYERS)) for engine in engines)
        for a, b in ((found.scratch_logits, expected.scratch_logits), (found.hidden, expected.hidden)):
            assert a.starts.tolist() == b.starts.tolist()
            check_close(a.values, b.values)
        for engine in engines:
            for i in range(num_sessions):
                engine.close(i)
            assert engine.free_slots == engine.info.kv_slots


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_graphs_give_the_bits_of_single_launches(checkpoint):
    """With a tap and without, in turns: each set of layers has its own graphs."""
    with_graphs, without = (load_fused(checkpoint, graphs=graphs).forward for graphs in (True, False))
    texts = Texts(4, 3)
    for parts in SCHEDULE:
        rows, _ = texts.rows(parts)
        for tap in (None, tap_of(rows), RowTap((0,), tap_of(rows).rows)):
            found, expected = with_graphs(rows, tap), without(rows, tap)
            assert torch.equal(found.logits, expected.logits)
            assert tap is None or torch.equal(found.tapped, expected.tapped)


def make_drafts(directory: Path) -> tuple[DraftModel, DraftModel]:
    """Two drafters of one model."""
    return DraftModel(load_fused(directory)), DraftModel(load_fused(directory))


SAMPLED = SamplingParams(temperature=0.8, seed=5)


@pytest.mark.parametrize("params", [[SamplingParams()], [SAMPLED], [SAMPLED, SamplingParams(), SAMPLED]], ids=len)
def test_chains_equal_one_pass_a_level(wide_heads, params):
    """Greedy and sampled, one session and several; twice, so that the second goes on from what the first left."""
    chained, stepped = make_drafts(wide_heads)
    rng = np.random.default_rng(6)
    for i, own in enumerate(params):
        context = random_tokens(rng, 5 + 40 * i)
        chained.open(i, context, own)
        stepped.open(i, context, own)
    for _ in range(2):
        requests = [Expansion(i, -1, tuple(range(8))) for i in range(len(params))]
        found, expected = chained.expand_chain(requests, 4), Drafter.expand_chain(stepped, requests, 4)
        assert chained._contexts.chains is not None
        for own, others in zip(found[:2], expected[:2], strict=True):
            for a, b in zip(own, others, strict=True):
                assert a.token_ids.tolist() == b.token_ids.tolist()
                np.testing.assert_allclose(a.scores, b.scores, atol=1e-3)
        assert chained.free_slots == stepped.free_slots
        for i in range(len(params)):
            right = [int(children.token_ids[0]) for children in found[i][:2]]
            tokens = np.array([*right, (right[-1] + 1) % VOCAB], np.int32)
            for draft in (chained, stepped):
                draft.commit(i, tokens, [0, 2])
    for i in range(len(params)):
        chained.close(i)
    assert chained.free_slots == chained.info.kv_slots


@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_round_of_chains_equals_one_pass_a_level(wide_heads, count):
    """Sessions that the device drafts for, and those that need the host, in one round; twice."""
    source, stepped = ChainModel(load_fused(wide_heads)), DraftModel(load_fused(wide_heads))
    kinds = [SAMPLED, SamplingParams(), SamplingParams(temperature=0.8, top_k=5, seed=2)]
    rng = np.random.default_rng(10)
    for i in range(count):
        context = random_tokens(rng, 5 + 7 * i % 40)
        source.open(i, context, kinds[i % 3])
        stepped.open(i, context, kinds[i % 3])
    for _ in range(2):
        chains = source.start(list(range(count)), 4, 2).collect()
        for i in range(count):
            (levels,) = Drafter.expand_chain(stepped, [Expansion(i, -1, tuple(range(8)))], 4)
            assert chains.token_ids[i].tolist() == [children.token_ids.tolist() for children in levels]
            followed = (i % 4) + 1
            tokens = np.append(chains.token_ids[i, :followed, 0], 3).astype(np.int32)
            right = followed + (followed < 4 and int(chains.token_ids[i, followed, 0]) == 3)
            assert commit_one(source, i, tokens) == right
            stepped.commit(i, tokens, [])
    for i in range(count):
        source.close(i)
    assert source.free_slots == source.info.kv_slots


def test_chains_grow_from_branches_of_one_session(wide_heads):
    chained, stepped = make_drafts(wide_heads)
    for draft in (chained, stepped):
        draft.open(1, random_tokens(np.random.default_rng(7), 20), SamplingParams())
        draft.expand([Expansion(1, -1, (0, 1, 2))])
        draft.expand([Expansion(1, 0, (3, 4))])
    requests = [Expansion(1, 1, (10, 11, 12)), Expansion(1, 4, (20, 21, 22))]
    found, expected = chained.expand_chain(requests, 3), Drafter.expand_chain(stepped, requests, 3)
    for own, others in zip(found[:2], expected[:2], strict=True):
        assert [c.token_ids.tolist() for c in own] == [c.token_ids.tolist() for c in others]
    (below,), (other,) = (draft.expand([Expansion(1, 12, (30, 31))]) for draft in (chained, stepped))
    assert below.token_ids.tolist() == other.token_ids.tolist()


def test_chains_stay_below_the_targets_vocabulary(wide_heads):
    draft, _ = make_drafts(wide_heads)
    draft.limit_vocab = 7
    draft.open(1, random_tokens(np.random.default_rng(8), 9), SamplingParams(temperature=2.0, seed=1))
    (levels,) = draft.expand_chain([Expansion(1, -1, tuple(range(21)))], 3)
    assert [sorted(children.token_ids.tolist()) for children in levels] == [list(range(7))] * 3


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.8, top_k=5), SamplingParams(temperature=0.8, strategy="probabilistic")]
)
def test_what_the_device_cannot_draw_goes_level_by_level(wide_heads, params):
    draft, _ = make_drafts(wide_heads)
    draft.open(1, random_tokens(np.random.default_rng(9), 9), params)
    (levels,) = draft.expand_chain([Expansion(1, -1, tuple(range(6)))], 3)
    assert len(levels) == 3


def test_a_failed_chain_gives_its_slots_back(wide_heads, monkeypatch):
    from specq.engines.torch.cuda.chain import CudaChainDrafter

    draft, _ = make_drafts(wide_heads)
    draft.open(1, random_tokens(np.random.default_rng(10), 9), SamplingParams())

    monkeypatch.setattr(CudaChainDrafter, "start", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError):
        draft.expand_chain([Expansion(1, -1, (0, 1, 2))], 3)
    draft.close(1)
    assert draft.free_slots == draft.info.kv_slots


def test_tree_type_is_not_needed_for_plain_rows(wide_heads):
    """A step of many plain rows has no extras at all."""
    ours, theirs, texts = load_fused(wide_heads).forward, load_generic(wide_heads), Texts(11, 4)
    for session in range(4):
        prompt, _ = texts.rows([(session, 4 + session, 0, True)])
        ours(prompt)
        theirs(prompt)
    rows, steps = texts.rows([(session, 1, 0, True) for session in range(4)])
    assert all(isinstance(step.tree, Tree) and not step.tree.num_nodes for step in steps)
    check_close(ours(rows).logits, theirs(rows).logits)


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("width", [99, 4096, 151_936])
def test_tokens_ranked_on_the_device_are_those_of_the_sampler(width, count):
    from specq.engines.models import rank_tokens
    from specq.engines.torch.top import _to_host, _top_on_device

    torch.manual_seed(width)
    logits = torch.randn(5, width) * 3
    params = [SamplingParams(), *(SamplingParams(temperature=t, seed=3) for t in (0.1, 0.8, 1.0, 2.0))]
    found = rank_tokens(logits.cuda(), params, range(7, 12), count)
    expected = rank_tokens(logits, params, range(7, 12), count)
    assert expected[0].tolist() == found[0].tolist()
    np.testing.assert_allclose(expected[1], found[1], atol=1e-3)
    scores = torch.full((2, width), -torch.inf)
    scores[:, [7, 3]] = torch.tensor([2.0, 1.0])
    tokens, log_probs = _to_host(*_top_on_device(scores.cuda(), None, count))
    assert tokens[:, :2].tolist() == [[7, 3][:count]] * 2
    assert np.isfinite(log_probs).sum(-1).tolist() == [min(count, 2)] * 2
