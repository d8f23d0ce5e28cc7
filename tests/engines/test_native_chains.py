"""Chains that C drafts at one call: what one pass a level gives, for any model, width, lineage, temperature and number
of threads."""

from __future__ import annotations

import numpy as np
import pytest

from specq.drafting import CONTEXT, Chains, Drafter, Expansion
from specq.drafting.draft_model.chain_model import ChainModel
from specq.drafting.draft_model.drafter import DraftModel
from specq.engines.native.chains import NativeChainDrafter
from specq.engines.native.compiler import kernels
from specq.protocol import SamplingParams
from specq.testing.checkpoints import make_checkpoint, random_tokens
from specq.testing.checkpoints_draft import VOCAB, head_tokens, make_draft
from specq.testing.toy_drafters import commit_one

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9, seed=5)
CUT = SamplingParams(temperature=0.9, top_k=40, seed=5)
KINDS = ("llama", "llama-bias", "llama-bf16", "qwen2", "qwen3", "draft")

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")


@pytest.fixture(params=KINDS, scope="module")
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return str(make_draft(path) if request.param == "draft" else make_checkpoint(request.param, path))


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many chains each call of C drafted."""
    found: list[int] = []
    start = NativeChainDrafter.start

    def counted(self, logits, starts, *arguments):
        found.append(len(starts))
        return start(self, logits, starts, *arguments)

    monkeypatch.setattr(NativeChainDrafter, "start", counted)
    return found


def rounds(source: ChainModel, depth: int, width: int, followed: int) -> list[Chains]:
    """Draft for sessions of all kinds round after round; each round commits so many tokens of a chain."""
    rng, found, kinds = np.random.default_rng(depth), [], (GREEDY, SAMPLED, CUT, GREEDY)
    for session_id, params in enumerate(kinds):
        source.open(session_id, random_tokens(rng, 5 + 17 * session_id), params)
    for _ in range(3):
        found.append(source.start(range(len(kinds)), depth, width).collect())
        for session_id, tokens in enumerate(found[-1].token_ids[:, :followed, 0]):
            commit_one(source, session_id, np.array([*tokens, 3], np.int32))
    return found


@pytest.mark.parametrize(("depth", "width", "followed"), [(1, 1, 0), (2, 1, 1), (4, 3, 2), (7, 2, 7)])
def test_one_call_gives_what_one_pass_a_level_gives(directory, calls, monkeypatch, depth, width, followed):
    drafted = rounds(ChainModel(directory, device="cpu", kv_slots=1024), depth, width, followed)
    assert calls == [3] * 3
    monkeypatch.setattr(NativeChainDrafter, "can_draft", lambda _self, _params: False)
    expected = rounds(ChainModel(directory, device="cpu", kv_slots=1024), depth, width, followed)
    assert calls == [3] * 3
    for chains, own in zip(drafted, expected, strict=True):
        assert chains.token_ids.tolist() == own.token_ids.tolist()
        np.testing.assert_allclose(chains.scores, own.scores, atol=1e-4)  # noise is near enough, not exact
        assert chains.scores[[0, 3]].tolist() == own.scores[[0, 3]].tolist()


def test_helpers_change_no_bit(directory):
    alone, helped = (
        rounds(ChainModel(directory, device="cpu", kv_slots=1024, threads=threads), 5, 2, 3) for threads in (1, 3)
    )
    for one, other in zip(alone, helped, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.scores.tolist() == other.scores.tolist()


def test_chains_below_nodes_see_their_ancestors(directory, calls, monkeypatch):
    """Two chains of one session, each below a node of its own, and one of another session."""
    monkeypatch.setattr(NativeChainDrafter, "runs_beside_host", True)
    at_once, stepped = (DraftModel(directory, device="cpu", kv_slots=512) for _ in range(2))
    contexts = {session_id: random_tokens(np.random.default_rng(session_id), 20) for session_id in (1, 2)}
    answers = []
    for model, draft in (
        (at_once, at_once.expand_chain),
        (stepped, lambda *asked: Drafter.expand_chain(stepped, *asked)),
    ):
        for session_id, context in contexts.items():
            model.open(session_id, context, GREEDY)
        model.expand([Expansion(1, CONTEXT, (0, 1)), Expansion(2, CONTEXT, (0, 1))])
        model.expand([Expansion(1, 1, (2, 3))])
        asked = [Expansion(1, 0, tuple(range(10, 16))), Expansion(1, 2, tuple(range(20, 26)))]
        answers.append(draft([*asked, Expansion(2, 1, tuple(range(10, 16)))], 3))
    assert calls == [3]
    for chain, own in zip(*answers, strict=True):
        for level, expected in zip(chain, own, strict=True):
            assert level.token_ids.tolist() == expected.token_ids.tolist()
            assert level.scores.tolist() == expected.scores.tolist()


def test_only_tokens_of_the_target_are_drafted(tmp_path):
    """A head with a reduced vocabulary. Tokens beyond the target's are left out."""
    source = ChainModel(str(make_draft(tmp_path)), device="cpu", kv_slots=256)
    source.limit_vocab = limit = VOCAB // 2
    source.open(1, np.arange(9, dtype=np.int32), GREEDY)
    assert set(source.start([1], 6, 3).collect().token_ids.flat) <= {
        token for token in head_tokens(tmp_path) if token < limit
    }
