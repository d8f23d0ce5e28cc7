"""An EAGLE-3 head away from its target: it drafts what plain arithmetic says, of true states where they are known and
of its own beyond."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specq.drafting import CONTEXT, DRAFTERS, Expansion
from specq.drafting.eagle3 import remote as eagle_trees
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.remote import EagleTrees
from specq.drafting.trees import remote as fed
from specq.drafting.trees.interface import TreeRequest
from specq.protocol import (
    BF16,
    INT8,
    Activations,
    ConfigError,
    EngineError,
    Float32Array,
    ModelInfo,
    SamplingParams,
    UInt16Array,
    pack_activations,
    to_bf16,
)
from specq.protocol.activations import from_bf16
from specq.testing.checkpoints import VOCAB
from specq.testing.checkpoints_eagle import WEIGHTS, eagle_logits, eagle_shape_of
from specq.verifier.sources import Followed
from tests.drafting.fed import HIDDEN, make_trees

COLUMNS = 23
SHAPE = eagle_shape_of(HIDDEN, VOCAB, COLUMNS, layers=(0, 1, 2))
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle")


@pytest.fixture(scope="module", params=["without torch", "with torch"])
def made(directory: Path, request: pytest.FixtureRequest) -> EagleTrees:
    trees = make_trees(directory)
    if request.param == "without torch":
        return trees
    head = Eagle(load_eagle(str(directory / "heads"), str(directory / "target"), trees.info, "cpu"))
    return EagleTrees(head, trees.info, form=trees.activations.form, window=trees.activations.window)


@pytest.fixture
def trees(made: EagleTrees) -> EagleTrees:
    for session_id in range(10):
        made.close(session_id)
    return made


class Text:
    """A random text and the target's hidden states of its rows, in a session."""

    def __init__(
        self, trees: EagleTrees, directory: Path, session_id: int, length: int, params: SamplingParams = GREEDY
    ):
        rng = np.random.default_rng(session_id + 100)
        self.trees, self.heads, self.session_id = trees, directory / "heads", session_id
        self.token_ids: list[int] = rng.integers(0, VOCAB, length).tolist()
        self.states: Float32Array = rng.normal(0, 1, (length + 80, 3 * HIDDEN)).astype(np.float32)
        self.next_id = 0
        trees.open(session_id, np.array(self.token_ids, np.int32), params)

    def observe(self, first: int, end: int) -> None:
        """Send the states before the tokens from `first` up to `end`."""
        self.trees.observe(self.session_id, first, self.states[first - 1 : end - 1])

    def commit(self, tokens: Sequence[int], path: Sequence[int] = ()) -> None:
        self.token_ids += tokens
        self.trees.commit(self.session_id, np.array(tokens, np.int32), path)

    def request(self, node_id: int, count: int = COLUMNS) -> Expansion:
        self.next_id += count
        return Expansion(self.session_id, node_id, tuple(range(self.next_id - count, self.next_id)))

    def check(self, node_id: int, path: Sequence[int], known: int, first: int = 1) -> list[tuple[int, int]]:
        """Expand a node, whose path of tokens this is, and compare its children with what plain arithmetic says where
        the states before the tokens from `first` up to `known` are true; return some of the children: node ids and
        tokens."""
        request = self.request(node_id)
        (children,) = self.trees.expand([request])
        embedding = load_file(self.heads / WEIGHTS)["embed_tokens.weight"]
        tokens = [*self.token_ids, *path][first:]
        taps = torch.from_numpy(self.states[first - 1 : known - 1])
        order = eagle_logits(self.heads, SHAPE, taps, tokens, embedding, first)[-1].log_softmax(0).sort(descending=True)
        np.testing.assert_allclose(children.scores, order.values, atol=3e-4)
        ids = load_file(self.heads / WEIGHTS)["t2d"].nonzero()[:, 0]
        assert children.token_ids[:4].tolist() == ids[order.indices[:4]].tolist()
        return list(zip(request.child_ids, children.token_ids.tolist(), strict=False))[:4]


def test_trees_are_those_of_plain_arithmetic(trees: EagleTrees, directory: Path) -> None:
    """Below true states, several levels deep, of several branches."""
    text = Text(trees, directory, 1, 9)
    text.observe(1, 9)
    (a, token), (b, other), *_ = text.check(CONTEXT, [], 9)
    (c, below), *_ = text.check(a, [token], 9)
    text.check(b, [other], 9)
    text.check(c, [token, below], 9)


def test_it_runs_ahead_and_takes_true_states_when_they_come(trees: EagleTrees, directory: Path) -> None:
    """What is committed without states is read with the head's own; then everything beyond the true ones is computed
    anew."""
    text = Text(trees, directory, 1, 9)
    text.observe(1, 9)
    (a, token), *_ = text.check(CONTEXT, [], 9)
    (c, below), *_ = text.check(a, [token], 9)
    (e, third), *_ = text.check(c, [token, below], 9)
    text.commit([token, below], [a, c])
    text.check(e, [third], 9)
    text.observe(9, 11)  # states of what was accepted
    text.check(e, [third], 11)
    (f, right), *_ = text.check(CONTEXT, [], 11)
    text.commit([right, 7], [f])  # a correction, whose state is to come
    text.check(CONTEXT, [], 11)
    text.commit([8])
    text.check(CONTEXT, [], 11)
    text.observe(11, 13)
    text.check(CONTEXT, [], 13)
    text.observe(13, 14)
    text.check(CONTEXT, [], 14)


def test_states_may_come_before_their_tokens_doubled_and_with_gaps(trees: EagleTrees, directory: Path) -> None:
    text = Text(trees, directory, 2, 9)
    text.observe(1, 12)
    text.check(CONTEXT, [], 9)
    text.commit([5])
    text.check(CONTEXT, [], 10)
    text.commit([6, 4, 3])
    text.check(CONTEXT, [], 12)
    text.observe(7, 12)
    text.check(CONTEXT, [], 12)
    text.commit([9, 9])
    text.observe(14, 15)  # two rows were lost
    text.check(CONTEXT, [], 15, first=14)


def test_a_text_is_known_from_later_on(trees: EagleTrees, directory: Path) -> None:
    """Where only the last states of a prompt come; of a text without any nothing is drafted."""
    text = Text(trees, directory, 3, 30)
    assert not trees.knows(3)
    (children,) = trees.expand([text.request(CONTEXT)])
    assert not len(children.token_ids)
    text.observe(21, 28)
    assert trees.knows(3)
    text.check(CONTEXT, [], 28, first=21)


def test_sessions_are_drafted_for_together(trees: EagleTrees, directory: Path) -> None:
    """Of different lengths, with nodes of different depths, and as alone."""
    texts = [Text(trees, directory, i, 5 + 4 * i) for i in range(1, 4)]
    for text in texts:
        text.observe(1, len(text.token_ids) - (text.session_id == 2))
    roots = trees.expand([text.request(CONTEXT, 3) for text in texts])
    below = trees.expand([text.request(i, 2) for text in texts[:2] for i in (0, 2)] + [texts[2].request(CONTEXT, 3)])
    assert below[4].token_ids.tolist() == roots[2].token_ids.tolist()
    for text, found, chosen in ((texts[0], roots[0], below[:2]), (texts[1], roots[1], below[2:4])):
        known = len(text.token_ids) - (text.session_id == 2)
        for rank, children in zip((0, 2), chosen, strict=True):
            fresh = text.check(rank, [int(found.token_ids[rank])], known)
            assert [token for _, token in fresh[:2]] == children.token_ids.tolist()


def test_tokens_without_states_are_bounded(trees: EagleTrees, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too far beyond the true states it drafts nothing, until some come; states without tokens are kept for a while."""
    text = Text(trees, directory, 4, 9)
    text.observe(1, 9)
    for i in range(eagle_trees.MOST_PREDICTED):
        assert trees.knows(4)
        text.commit([i])
    text.check(CONTEXT, [], 9)
    text.commit([3])
    assert not trees.knows(4)
    text.observe(9, len(text.token_ids))
    text.check(CONTEXT, [], len(text.token_ids))
    monkeypatch.setattr(fed, "MOST_WAITING", 5)
    late = Text(trees, directory, 5, 9)
    late.observe(11, 16)
    late.observe(16, 18)
    late.commit([1] * 9)
    text.check(CONTEXT, [], len(text.token_ids))
    late.check(CONTEXT, [], 18, first=16)


def test_rows_are_computed_anew_when_they_become_many(
    trees: EagleTrees, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_trees, "MOST_TREE_ROWS", 3)
    text = Text(trees, directory, 6, 9)
    text.observe(1, 9)
    level = text.check(CONTEXT, [], 9)
    for node_id, token in level:
        (c, below), *_ = text.check(node_id, [token], 9)
        text.check(c, [token, below], 9)


def test_a_failed_pass_leaves_no_state(trees: EagleTrees, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same expansion is made once more, when it works again."""
    text = Text(trees, directory, 7, 9)
    text.observe(1, 9)
    (a, token), *_ = text.check(CONTEXT, [], 9)

    def fail(*_: object) -> None:
        raise EngineError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(trees._eagle, "run", fail)
        with pytest.raises(EngineError, match="no memory"):
            trees.expand([text.request(a)])
    text.check(a, [token], 9)


def message_of(halves: UInt16Array, form: str) -> Activations:
    """Return the states behind a text's first token [rows, width] as they travel."""
    data, scales = pack_activations(halves, form, 3)
    return Activations(
        session_id=1,
        epoch=1,
        lane=0,
        first=1,
        tap_layers=(0, 1, 2),
        tap_form=form,
        width=halves.shape[1],
        data=data,
        scales=scales,
    )


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3)])
def test_drafts_are_those_of_the_head_beside_the_verifier(directory: Path, params: SamplingParams) -> None:
    """Given the same states in bfloat16: the same tokens with the same scores, three levels deep. In 8 bits they are
    near."""
    trees = make_trees(directory)
    text = Text(trees, directory, 1, 40, params)
    halves = to_bf16(text.states[:39])
    message = message_of(halves, BF16)
    trees.observe(1, 1, message.rows())
    info = ModelInfo("target", "", "", "torch", VOCAB, VOCAB, (), 600, "")
    colocated = Eagle(load_eagle(str(directory / "heads"), str(directory / "target"), info, "cpu"))
    colocated.observe(torch.from_numpy(from_bf16(halves)), [Followed(1, 1, text.token_ids[1:], range(39))])
    (pending,) = colocated.start([TreeRequest([1], [params], 3, None, -np.inf)])
    grown = pending.collect()
    below = {place: np.flatnonzero(grown.parents[0] == place) for place in range(-1, len(grown.depths))}
    node_ids, places = [CONTEXT], [-1]
    for _ in range(3):
        requests = [text.request(node_id, 4) for node_id in node_ids]
        for place, children in zip(places, trees.expand(requests), strict=True):
            own = below[place][:4]
            assert children.token_ids.tolist() == grown.token_ids[0, own].tolist()
            np.testing.assert_allclose(children.scores, grown.scores[0, own], atol=1e-4)
        # Of each node that was expanded there the first two children that were expanded, too.
        following = [
            (request.child_ids[i], child)
            for place, request in zip(places, requests, strict=True)
            for i, child in enumerate(below[place][:4].tolist())
            if len(below[child])
        ]
        node_ids, places = [node_id for node_id, _ in following[:2]], [place for _, place in following[:2]]


def test_eight_bits_are_near(directory: Path) -> None:
    """The largest error of a number is half of a step, its layer's largest magnitude / 127."""
    trees = make_trees(directory)
    text = Text(trees, directory, 1, 40)
    rows = text.states[:39].copy()
    rows[:, :HIDDEN] *= 100  # layers differ by their magnitudes
    halves = to_bf16(rows)
    message = message_of(halves, INT8)
    found, exact = message.rows().reshape(39, 3, -1), from_bf16(halves).reshape(39, 3, -1)
    assert np.all(np.abs(found - exact) <= np.abs(exact).max(-1, keepdims=True) / 127 * 0.501)
    assert len(message.data) == 39 * trees.width


def test_the_proposer_is_made_of_a_configuration(directory: Path) -> None:
    """With its target; what it asks for is said to the broker."""
    trees = make_trees(directory, activations=INT8, window=77)
    assert (trees.activations.layers, trees.activations.form, trees.activations.window) == ((0, 1, 2), INT8, 77)
    assert trees.info.num_tokens == VOCAB
    assert len(trees.info.fingerprint) == 64
    spec = DRAFTERS.resolve("eagle3")
    with pytest.raises(ConfigError, match=r"name it by draft\.target"):
        spec.make(str(directory / "heads"))
