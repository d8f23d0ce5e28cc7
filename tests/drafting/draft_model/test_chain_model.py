"""Chains of a draft model in arrays: the same as its own tree's first children, level by level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specq.drafting import Chains, Drafter, Expansion
from specq.drafting.draft_model.chain_model import ChainModel
from specq.drafting.draft_model.drafter import DraftModel
from specq.drafting.draft_model.making import level_times
from specq.engines.native import ForwardOutput, PackedRows
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.testing.checkpoints import VOCAB, make_checkpoint, random_tokens
from specq.testing.toy_drafters import commit_one
from specq.verification import NO_TOKEN

SAMPLED = SamplingParams(temperature=0.9, seed=5)
CUT = SamplingParams(temperature=0.9, top_k=40, seed=6)
DRAWN = SamplingParams(temperature=0.9, strategy="probabilistic")
DEPTH, WIDTH = 4, 2


@pytest.fixture
def directory(tmp_path):
    return str(make_checkpoint("llama", tmp_path))


def draft(source: ChainModel, ids: list[int], depth: int = DEPTH, width: int = WIDTH) -> Chains:
    return source.start(ids, depth, width).collect()


def expected(stepped: DraftModel, session_id: int, depth: int = DEPTH, width: int = WIDTH) -> list[list[int]]:
    """Return the children at each level of a chain, by one pass each."""
    request = Expansion(session_id, -1, tuple(range(depth * width)))
    return [children.token_ids.tolist() for children in Drafter.expand_chain(stepped, [request], depth)[0]]


@pytest.mark.parametrize("followed", range(DEPTH + 1))
def test_chains_are_the_trees_first_children_round_after_round(directory, followed):
    """However far verdicts follow them; and nothing is left behind."""
    source, stepped = (kind(directory, device="cpu", kv_slots=1024) for kind in (ChainModel, DraftModel))
    rng, params = np.random.default_rng(1), {1: SamplingParams(), 2: SAMPLED, 3: CUT}
    for session_id, own in params.items():
        context = random_tokens(rng, 9 + 20 * session_id)
        source.open(session_id, context, own)
        stepped.open(session_id, context, own)
    for _ in range(3):
        chains = draft(source, [1, 2, 3])
        for i, session_id in enumerate(params):
            assert chains.token_ids[i].tolist() == expected(stepped, session_id)
            right = chains.token_ids[i, :followed, 0].tolist()
            wrong = (int(chains.token_ids[i, followed, 0]) + 1) % VOCAB if followed < DEPTH else 3
            tokens = np.array([*right, wrong], np.int32)
            assert commit_one(source, session_id, tokens) == followed
            stepped.commit(session_id, tokens, [])
    for session_id in params:
        source.close(session_id)
    assert source.free_slots == 1024


def test_trees_may_be_drafted_with_the_same_contexts(directory):
    """Sessions of both kinds in turns, in one KV memory: each drafts what it would alone, and nothing is left
    behind."""
    trees, alone, chains_alone = (
        kind(directory, device="cpu", kv_slots=1024) for kind in (DraftModel, DraftModel, ChainModel)
    )
    source, rng = trees.in_chains(), np.random.default_rng(3)
    contexts = {session_id: random_tokens(rng, 9 + 20 * session_id) for session_id in (1, 2)}
    for sources, session_id in (((source, chains_alone), 1), ((trees, alone), 2)):
        for one in sources:
            one.open(session_id, contexts[session_id], SAMPLED)
    for _ in range(3):
        chains = draft(source, [1])
        requests = [Expansion(2, -1, (100, 101))]
        (found,), (same,) = trees.expand(requests), alone.expand(requests)
        assert found.token_ids.tolist() == same.token_ids.tolist()
        assert chains.token_ids.tolist() == draft(chains_alone, [1]).token_ids.tolist()
        for one in (source, chains_alone):
            commit_one(one, 1, chains.token_ids[0, :2, 0])
        for one in (trees, alone):
            one.commit(2, found.token_ids[:1], [100])
    source.close(1)
    trees.close(2)
    assert source.free_slots == trees.free_slots == 1024


def test_tokens_past_the_chain_are_taken(directory):
    """A round without a draft, and a verdict longer than the chain."""
    source, stepped = (kind(directory, device="cpu", kv_slots=1024) for kind in (ChainModel, DraftModel))
    context = random_tokens(np.random.default_rng(2), 12)
    source.open(1, context, SamplingParams())
    stepped.open(1, context, SamplingParams())
    right = draft(source, [1], 1, 1).token_ids[0, 0, 0]
    for tokens in ([right, 5, 6, 7], [8], [9, 10]):
        assert commit_one(source, 1, np.array(tokens, np.int32)) == (tokens[0] == right)
        stepped.commit(1, np.array(tokens, np.int32), [])
    assert draft(source, [1]).token_ids[0].tolist() == expected(stepped, 1)


def test_many_sessions_at_once_follow_as_one_by_one(directory):
    """Verdicts of any length, for sessions with and without chains. Some sessions are closed and opened anew."""
    rng, sources = np.random.default_rng(8), [ChainModel(directory, device="cpu", kv_slots=4096) for _ in range(2)]
    for session_id in range(6):
        context = random_tokens(rng, 7 + 9 * session_id)
        for source in sources:
            source.open(session_id, context, SAMPLED)
    for _ in range(12):
        asked = [session_id for session_id in range(6) if rng.random() < 0.7] or [0]
        depth = int(rng.integers(1, 6))
        chains, same = (draft(source, asked, depth) for source in sources)
        assert chains.token_ids.tolist() == same.token_ids.tolist()
        told = [session_id for session_id in range(6) if session_id in asked or rng.random() < 0.5]
        texts = []
        for session_id in told:
            foreseen = chains.token_ids[asked.index(session_id), :, 0] if session_id in asked else np.zeros(0, np.int32)
            kept = foreseen[: rng.integers(0, depth + 1)]
            texts.append(
                np.append(kept, random_tokens(rng, int(rng.integers(0 if len(kept) else 1, 3)))).astype(np.int32)
            )
        at_once = sources[0].commit(told, np.array([*map(len, texts)]), np.concatenate(texts))
        one_by_one = [commit_one(sources[1], *one) for one in zip(told, texts, strict=True)]
        assert at_once.tolist() == one_by_one
        gone = int(rng.integers(0, 6))
        context = random_tokens(rng, 40)
        for source in sources:
            source.close(gone)
            source.open(gone, context, SAMPLED)
    for source in sources:
        for session_id in range(6):
            source.close(session_id)
        assert source.free_slots == 4096


def test_a_refused_commit_changes_no_session(directory):
    """A session that is not open: the others are as they were."""
    source, alone = (ChainModel(directory, device="cpu", kv_slots=256) for _ in range(2))
    for one in (source, alone):
        one.open(1, random_tokens(np.random.default_rng(9), 9), SamplingParams())
        chains = draft(one, [1])
    with pytest.raises(EngineError, match="not open"):
        source.commit([1, 2], np.array([2, 1]), np.array([*chains.token_ids[0, :2, 0], 5], np.int32))
    for one in (source, alone):
        assert commit_one(one, 1, chains.token_ids[0, :2, 0]) == 2
    assert draft(source, [1]).token_ids.tolist() == draft(alone, [1]).token_ids.tolist()


def test_an_unverified_chain_is_drafted_again(directory):
    """The same chain comes of the same context, and its slots are given back."""
    source = ChainModel(directory, device="cpu", kv_slots=256)
    source.open(1, random_tokens(np.random.default_rng(3), 12), SamplingParams())
    draft(source, [1])
    commit_one(source, 1, np.array([7, 8], np.int32))
    first, free = draft(source, [1]), source.free_slots
    for _ in range(3):
        assert draft(source, [1]).token_ids.tolist() == first.token_ids.tolist()
    assert source.free_slots == free


def test_without_room_no_state_changes(directory):
    source = ChainModel(directory, device="cpu", kv_slots=20)
    source.open(1, random_tokens(np.random.default_rng(4), 17), SamplingParams())
    with pytest.raises(EngineError, match="free"):
        source.start([1], 8, 1)
    assert draft(source, [1], 3, 1).token_ids.min() >= 0
    source.close(1)
    assert source.free_slots == 20


def test_drawn_chains_bring_their_distributions(directory):
    """Sessions whose drafts are drawn, beside one whose are not."""
    source = ChainModel(directory, device="cpu", kv_slots=256, distribution_size=6)
    for session_id, params in ((1, DRAWN), (2, SAMPLED)):
        source.open(session_id, random_tokens(np.random.default_rng(5), 9), params)
    chains = draft(source, [1, 2])
    assert [len(distributions) for distributions in chains.distributions] == [DEPTH, 0]
    for distribution, tokens in zip(chains.distributions[0], chains.token_ids[0], strict=True):
        assert set(tokens[tokens != NO_TOKEN].tolist()) <= set(distribution.ids.tolist())


def test_chains_end_at_the_maximum_length(directory):
    """A token beyond the model's positions is not drafted. A session without any room drafts no tokens."""
    source = ChainModel(directory, device="cpu", kv_slots=2048)
    longest = source.info.max_length
    for session_id, length in ((1, longest - 2), (2, longest), (3, 9)):
        source.open(session_id, random_tokens(np.random.default_rng(6), length), SamplingParams())
    chains = draft(source, [1, 2, 3])
    assert (chains.token_ids[:, :, 0] != NO_TOKEN).sum(1).tolist() == [2, 0, DEPTH]


def test_profiling_leaves_no_session(directory):
    source = ChainModel(directory, device="cpu", kv_slots=4096)
    assert min(level_times(source, [1, 4], 3, {1, 2})) > 0
    source.open(-1, random_tokens(np.random.default_rng(7), 3), SamplingParams())


class Recording:
    """A forward pass that stands for one which is recorded for each padded size, of few rows of a session or of many:
    notes which were."""

    uses_graphs, jumps = True, (1, 4, 8, 16, 24, 32, 48, 64, 1024)

    def __init__(self, inner: Any) -> None:
        self._inner, self.recorded = inner, set[tuple[int, bool]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, rows: PackedRows) -> ForwardOutput:
        most = int(np.diff(rows.row_starts).max())
        self.recorded.add((next(size for size in self.jumps if size >= rows.num_rows), most <= 2))
        return self._inner(rows)


@pytest.mark.parametrize("most_sessions", [1, 5, 12, 64])
def test_after_a_warm_up_no_pass_is_the_first_of_its_kind(directory, most_sessions):
    """Whichever sessions draft, behind verdicts and behind prompts."""
    source = ChainModel(directory, device="cpu", kv_slots=900)
    forward = source.contexts._forward = Recording(source.contexts._forward)
    source.contexts.warm_up(most_sessions)
    assert source.free_slots == 900
    known, rng = forward.recorded.copy(), np.random.default_rng(8)
    assert known >= {(size, False) for size in Recording.jumps[1:-1]}
    assert (1024, False) not in known  # there is no room for it
    assert ((1024, True) in known) == (most_sessions == 64)  # who has two rows each
    for session_id in range(most_sessions):
        source.open(session_id, random_tokens(rng, int(rng.integers(3, 9))), SamplingParams())
    for _ in range(20):
        ids = sorted(rng.choice(most_sessions, int(rng.integers(1, most_sessions + 1)), replace=False).tolist())
        source.contexts.compute(source.contexts.pool.places(ids)[: 64 // 8])
        places = source.contexts.pool.places(
            [i for i in ids if not source.contexts.num_pending(source.contexts.pool.places([i]))]
        )
        if len(places):
            source.contexts.append(
                places, counts := rng.integers(1, 3, len(places)), random_tokens(rng, int(counts.sum()))
            )
            source.contexts.compute(places[: 64 // 2])
    assert forward.recorded <= known


def test_without_graph_capture_no_warm_up_pass_runs(directory):
    source = ChainModel(directory, device="cpu", kv_slots=900)
    assert source.contexts.recorded_sizes == ()
    source.contexts._forward = None
    source.contexts.warm_up(8)


def test_a_chain_has_only_tokens_that_a_grammar_allows_behind_it(directory):
    """Beside a session without a grammar, whose chain stays the same, and one that draws, which takes no masks."""
    source = ChainModel(directory, device="cpu", kv_slots=1024)
    for session_id, params in {1: SAMPLED, 2: SAMPLED, 3: DRAWN}.items():
        source.open(session_id, random_tokens(np.random.default_rng(session_id), 12), params)
    free, paths = draft(source, [1, 2]), list[list[int]]()

    def every_third(path):
        """Allow multiples of 3, and nothing behind two tokens."""
        paths.append([*path])
        bits = np.zeros(-(-VOCAB // 32) * 32, np.bool_)
        bits[:VOCAB:3] = True
        return np.packbits(bits, bitorder="little").view(np.int32) if len(path) < 2 else None

    source.masks = {2: every_third, 3: every_third}
    masked = draft(source, [1, 2, 3])
    assert masked.token_ids[0].tolist() == free.token_ids[0].tolist()
    own = masked.token_ids[1]
    assert (own[:2] % 3 == 0).all()
    assert (own[2:] == NO_TOKEN).all()
    assert paths == [[], own[:1, 0].tolist(), own[:2, 0].tolist()]
    assert (masked.token_ids[2] != NO_TOKEN).any(1).all()


def odd_tokens(_path: Any) -> np.ndarray:
    """Allow odd tokens."""
    bits = np.zeros(-(-VOCAB // 32) * 32, np.bool_)
    bits[1:VOCAB:2] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def every_third_pair(path: list[int]) -> list[int]:
    """Force two tokens in front, and behind each choice that follows."""
    return [20 + len(path), 21 + len(path)] if len(path) % 3 == 0 else []


def alone(directory: str, context: list[int], params: SamplingParams) -> list[int]:
    """Return the children that a new model gives to a context, among odd tokens."""
    model = DraftModel(directory, device="cpu", kv_slots=512)
    model.open(1, np.array(context, np.int32), params)
    model.masks = {1: odd_tokens}
    return model.expand([Expansion(1, -1, tuple(range(WIDTH)))])[0].token_ids.tolist()


@pytest.mark.parametrize("followed", [0, 1, 2, 4, 5, 8, 9])
def test_forced_tokens_are_a_part_of_the_chain_and_need_no_pass(directory, followed):
    """Round after round, however far verdicts follow. Beside it: no forced tokens, and no grammar."""
    source, rng = ChainModel(directory, device="cpu", kv_slots=1024), np.random.default_rng(4)
    contexts = {session_id: random_tokens(rng, 12) for session_id in (1, 2, 3)}
    for session_id, context in contexts.items():
        source.open(session_id, context, SAMPLED)
    texts = {session_id: context.tolist() for session_id, context in contexts.items()}
    source.masks, source.forced = {1: odd_tokens, 3: odd_tokens}, {1: every_third_pair}
    run, num_rows = source.contexts.run, list[int]()

    def counted(rows: PackedRows) -> Any:
        num_rows.append(len(rows.token_ids))
        return run(rows)

    source.contexts.run = counted
    for _ in range(3):
        num_rows.clear()
        chains = draft(source, [1, 2, 3], depth=3)
        assert len(num_rows) == 3
        assert num_rows[1:] == [3 + 1, 3 + 1]  # a choice and two forced tokens, and the other session's
        own = chains.token_ids[0]
        for at in range(9):
            path = own[:at, 0].tolist()
            right = (
                [20 + 3 * (at // 3) + at % 3, NO_TOKEN] if at % 3 < 2 else alone(directory, texts[1] + path, SAMPLED)
            )
            assert own[at].tolist() == right
        assert own[9:11, 0].tolist() == every_third_pair([0] * 9)
        assert (own[11:] == NO_TOKEN).all()
        assert chains.token_ids[2, 0].tolist() == alone(directory, texts[3], SAMPLED)
        assert (chains.token_ids[1:, 3:] == NO_TOKEN).all()
        for i, session_id in enumerate((1, 2, 3)):
            tokens = [*chains.token_ids[i, : followed if i == 0 else 1, 0].tolist(), 2]
            texts[session_id] += tokens
            assert commit_one(source, session_id, np.array(tokens, np.int32)) == len(tokens) - 1
    for session_id in texts:
        source.close(session_id)
    assert source.free_slots == 1024


def test_a_chain_that_is_all_forced_ends_at_its_room(directory):
    """No pass can find more, and the context's KV is computed later."""
    source = ChainModel(directory, device="cpu", kv_slots=1024)
    source.open(1, random_tokens(np.random.default_rng(5), 12), SAMPLED)
    source.masks, source.forced = {1: odd_tokens}, {1: lambda path: [7] * 40 if not path else []}
    chains = draft(source, [1], depth=2)
    count = int((chains.token_ids[0, :, 0] >= 0).sum())
    assert chains.token_ids[0, :16, 0].tolist() == [7] * 16
    assert count == 18
    commit_one(source, 1, np.array([7, 7, 3], np.int32))
    source.close(1)
    assert source.free_slots == 1024
