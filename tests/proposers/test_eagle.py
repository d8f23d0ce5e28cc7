"""An EAGLE-3 head's own contexts and trees: whatever came in between, it says what plain arithmetic says of the same path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specq.engines.torch import load_eagle
from specq.proposers import Followed, draws_children
from specq.proposers import eagle as module
from specq.proposers.eagle import Eagle
from specq.proposers.state_cache import StateCache
from specq.protocol import ModelInfo, SamplingParams
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_eagle import WEIGHTS, eagle_logits, eagle_shape_of, make_eagle

HIDDEN, COLUMNS = 40, 23
SHAPE = eagle_shape_of(HIDDEN, VOCAB, COLUMNS, layers=(0, 1, 2))
INFO = ModelInfo("target", "", "", "torch", VOCAB, VOCAB, (), 600, "")
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle(tmp_path_factory.mktemp("head"), SHAPE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture
def head(made: Path, target: Path) -> Eagle:
    return Eagle(load_eagle(str(made), str(target), INFO, "cpu"))


class Text:
    """A random text and the target's hidden states of its rows."""

    def __init__(self, seed: int, length: int) -> None:
        rng = np.random.default_rng(seed)
        self.token_ids = rng.integers(0, VOCAB, length).tolist()
        self.states = torch.from_numpy(rng.normal(0, 1, (length, 3 * HIDDEN)).astype(np.float32))

    def part(self, session_id: int, first: int, end: int, offset: int = 0) -> Followed:
        """The tokens from `first` up to `end`, where the states of the text begin at this row."""
        return Followed(session_id, first, self.token_ids[first:end], range(offset + first - 1, offset + end - 1))

    def expected(self, made: Path, path: Sequence[int], end: int, first: int = 1) -> torch.Tensor:
        """What the head says behind a path below the context of `end` tokens, if it knows them from `first` on."""
        embedding = load_file(made / WEIGHTS)["embed_tokens.weight"]
        tokens, states = [*self.token_ids[first:end], *path], self.states[first - 1 : end - 1]
        return eagle_logits(made, SHAPE, states, tokens, embedding, first)[-1]


def check(head: Eagle, made: Path, texts: dict[int, tuple[Text, int, int]], paths: int = 3) -> None:
    """Grow a tree of two rows a level below each text (with its end, and the first token known), and compare each row."""
    contexts = head.start(list(texts), [GREEDY] * len(texts))
    growth = contexts.grow(np.arange(len(texts)))
    known = {session_id: [[]] for session_id in texts}
    for level in range(paths):
        ranked = growth.ranked(COLUMNS)
        for i, (session_id, (text, end, first)) in enumerate(texts.items()):
            for row, path in enumerate(known[session_id]):
                logits = text.expected(made, path, end, first)
                order = logits.log_softmax(0).sort(descending=True)
                np.testing.assert_allclose(ranked.scores[i, row], order.values, atol=2e-4)
                columns = order.indices[:5].tolist()
                assert ranked.token_ids[i, row, :5].tolist() == [ids(made)[column] for column in columns]
        rows = ranked.token_ids.shape[1]
        parents = np.array([[rows - 1, 0] for _ in texts])
        token_ids = np.array([[3 + level, 40 + i] for i in range(len(texts))], np.int32)
        growth.expand(parents, token_ids)
        known = {
            session_id: [
                [*known[session_id][parent], token]
                for parent, token in zip(parents[i].tolist(), token_ids[i].tolist(), strict=True)
            ]
            for i, session_id in enumerate(texts)
        }


def ids(made: Path) -> list[int]:
    return load_file(made / WEIGHTS)["t2d"].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("most_rows", [1, 4, 512])
def test_rows_are_those_of_plain_arithmetic(
    head: Eagle, made: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    """Of several texts of different lengths in one batch, taken in at once or bit by bit, in passes of so many rows."""
    monkeypatch.setattr(module, "MOST_ROWS", most_rows)
    one, other, third = Text(1, 30), Text(2, 30), Text(3, 30)
    head.observe(torch.cat([one.states, other.states]), [one.part(1, 1, 9), other.part(2, 1, 4, offset=30)])
    check(head, made, {1: (one, 9, 1), 2: (other, 4, 1)})
    head.observe(third.states, [third.part(3, 1, 20)])
    head.observe(one.states, [one.part(1, 9, 10)])
    head.observe(other.states, [other.part(2, 4, 7)])
    check(head, made, {3: (third, 20, 1), 1: (one, 10, 1), 2: (other, 7, 1)})


def test_nothing_of_a_tree_remains(head: Eagle, made: Path) -> None:
    """A tree that nobody followed, and one text asked twice without anything new."""
    text = Text(4, 20)
    head.observe(text.states, [text.part(1, 1, 9)])
    for end in (9, 9, 13):
        head.observe(text.states, [text.part(1, 9, end)] if end > 9 else [])
        check(head, made, {1: (text, end, 1)})


def test_what_is_known_is_skipped_and_a_gap_begins_anew(head: Eagle, made: Path) -> None:
    text = Text(5, 40)
    head.observe(text.states, [text.part(1, 4, 9)])  # the engine had the beginning in its cache
    check(head, made, {1: (text, 9, 4)}, paths=2)
    head.observe(text.states, [text.part(1, 6, 12)])  # an evicted session's prompt comes again
    assert head.known(1) == 12
    check(head, made, {1: (text, 12, 4)}, paths=2)
    head.observe(text.states, [text.part(1, 20, 30)])
    assert head.known(1) == 30
    check(head, made, {1: (text, 30, 20)}, paths=2)
    head.observe(text.states, [text.part(1, 6, 12)])
    assert head.known(1) == 30


@pytest.mark.slow
def test_places_are_used_again(head: Eagle, made: Path) -> None:
    """By sessions that come and go; what the one before left is not seen."""
    long, short = Text(6, 300), Text(7, 10)
    for session_id in range(5):
        text, end = (long, 290) if session_id % 2 == 0 else (short, 6)
        head.observe(text.states, [text.part(session_id, 1, end)])
        check(head, made, {session_id: (text, end, 1)}, paths=2)
        head.close(session_id)
        assert head.known(session_id) == 0
    head.close(77)


def test_a_text_that_is_too_long_is_known_from_later_on(
    head: Eagle, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody asked for trees for long, and where its keys would take too much memory."""
    text = Text(8, 60)
    monkeypatch.setattr(module, "MOST_WAITING", 20)
    head.observe(text.states, [text.part(1, 1, 31)])
    assert head.known(1) == 31
    check(head, made, {1: (text, 31, 21)}, paths=2)
    monkeypatch.setattr(StateCache, "most_rows", 16)
    head.observe(text.states, [text.part(1, 31, 43)])
    check(head, made, {1: (text, 43, 35)}, paths=2)


def test_tokens_are_ranked_with_the_jobs_own_noise(head: Eagle) -> None:
    """At a temperature, by place; but not where the verifier draws by itself."""
    text = Text(9, 20)
    head.observe(text.states, [text.part(1, 1, 9)])
    sampled = SamplingParams(temperature=0.8, seed=3)
    drawn = SamplingParams(temperature=0.8, seed=3, strategy="probabilistic")
    assert draws_children(drawn)
    found = [
        head.start([1], [params]).grow(np.array([0])).ranked(COLUMNS).token_ids.tolist()
        for params in (GREEDY, sampled, SamplingParams(temperature=0.8, seed=4), drawn, sampled)
    ]
    assert found[0] == found[3] != found[1] != found[2]
    assert found[1] == found[4]
