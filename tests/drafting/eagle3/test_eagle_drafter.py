"""An EAGLE-3 head's own contexts and trees: after any history, its output equals plain arithmetic on the same path.

In the shapes that are needed; in recorded ones, with a stand-in that replays what it was first given; by kernels of our
own, under Triton's interpreter (TRITON_INTERPRET=1); and from CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch.nn.functional import scaled_dot_product_attention

from specq.drafting import draws_children
from specq.drafting.eagle3 import passes as eagle_passes
from specq.drafting.eagle3 import row_head as module
from specq.drafting.eagle3.arrays import load_arrays
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.host import HostEagle
from specq.drafting.eagle3.interface import Grown, TreeRequest
from specq.drafting.eagle3.loading import EagleHead, load_eagle
from specq.drafting.eagle3.network import EagleNetwork
from specq.drafting.medusa.interface import Ranked
from specq.drafting.rank_trees import RankTree, tree_for
from specq.protocol import ModelInfo, SamplingParams, Speculation
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.growth import grow
from specq.verification.sampling import perturbed_scores
from specq.verifier.sources import Followed
from tests.devices import NEEDS_CUDA, NEEDS_INTERPRETER
from tests.replaying import StandIn

HIDDEN, COLUMNS = 40, 23
SHAPE = eagle_shape_of(HIDDEN, VOCAB, COLUMNS, layers=(0, 1, 2))
INFO = ModelInfo("target", "", "", "torch", VOCAB, VOCAB, (), 600, "")
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=3)
CUT = replace(SAMPLED, top_k=3)
FIXED = tree_for(Speculation(tree=((0, 0, 0), (0, 2), (1, 1, 0), (9,))), 8)
EVERYTHING = -np.inf


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle(tmp_path_factory.mktemp("head"), SHAPE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"))


def on_gpu(head: EagleHead) -> EagleHead:
    """The same head on a GPU, in float32."""
    network = deepcopy(head.network).cuda()
    network.fuse()
    return replace(head, network=network)


@pytest.fixture(scope="module")
def plain(made: Path, target: Path) -> EagleHead:
    return load_eagle(str(made), str(target), INFO, "cpu")


@pytest.fixture(
    params=[
        "as needed",
        "without torch",
        "recorded",
        pytest.param("by kernels", marks=NEEDS_INTERPRETER),
        pytest.param("on a GPU", marks=NEEDS_CUDA),
    ]
)
def head(
    request: pytest.FixtureRequest, plain: EagleHead, made: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> Eagle | HostEagle:
    if request.param == "without torch":
        return HostEagle(load_arrays(str(made), str(target), INFO))
    if request.param == "on a GPU":
        return Eagle(on_gpu(plain))
    if request.param == "by kernels":
        from specq.drafting.eagle3.fused import FusedEagle

        monkeypatch.setattr(eagle_passes, "eagle_kernels", lambda head: FusedEagle(head.network, head.names))
    return Eagle(plain, None if request.param == "as needed" else StandIn())


class Text:
    """A random text and the target's hidden states of its rows."""

    def __init__(self, seed: int, length: int) -> None:
        rng = np.random.default_rng(seed)
        self.token_ids = rng.integers(0, VOCAB, length).tolist()
        self.states = torch.from_numpy(rng.normal(0, 1, (length, 3 * HIDDEN)).astype(np.float32))

    def part(self, session_id: int, first: int, end: int, offset: int = 0) -> Followed:
        """The tokens from `first` up to `end`, where the states of the text begin at this row."""
        return Followed(session_id, first, self.token_ids[first:end], range(offset + first - 1, offset + end - 1))

    def expected(self, network: EagleNetwork, path: Sequence[int], end: int, first: int = 1) -> torch.Tensor:
        """What the head says behind a path below the context of `end` tokens, if it knows them from `first` on."""
        tokens, states = [*self.token_ids[first:end], *path], self.states[first - 1 : end - 1]
        return said(network, states, tokens, first)


@torch.inference_mode()
def said(network: EagleNetwork, taps: torch.Tensor, token_ids: Sequence[int], first: int) -> torch.Tensor:
    """What a network says behind tokens, of which those beyond the target's states are read with its own: in whole
    passes."""
    states = network.project(taps)
    while True:
        count = len(states)
        mask = torch.ones(count, count, dtype=torch.bool).tril()

        def attend(queries: Any, keys: Any, values: Any, mask: torch.Tensor = mask) -> Any:
            moved = (part.transpose(1, 2) for part in (queries, keys, values))
            return scaled_dot_product_attention(*moved, attn_mask=mask, enable_gqa=True).transpose(1, 2)

        rotations = network.rotations(torch.arange(count)[None] + first - 1, states.dtype)
        found = network(states[None], torch.tensor([token_ids[:count]]), rotations, attend)[0]
        if count == len(token_ids):
            return network.logits(found[-1])
        states = torch.cat([states, found[-1:]])


Known = dict[int, tuple[Text, int, int]]  # by session: a text, its end, and the first token that is known


def observe(head: Eagle | HostEagle, states: torch.Tensor, followed: Sequence[Followed]) -> None:
    head.observe(head.copied(states.numpy()), followed)


class Plainly:
    """Growth by plain arithmetic, each row by itself. Fulfils `specq.testing.growth.Growth`."""

    def __init__(self, plain: EagleHead, texts: Known, params: Sequence[SamplingParams]) -> None:
        assert plain.token_ids is not None
        self.network, self.names = plain.network, plain.token_ids
        self.texts, self.params = list(texts.values()), params
        self.paths: list[list[list[int]]] = [[[]] for _ in self.texts]

    def ranked(self, count: int) -> Ranked:
        found = [
            [self._row(*text, params, path, count) for path in paths]
            for text, params, paths in zip(self.texts, self.params, self.paths, strict=True)
        ]
        tokens, scores = ([[row[i] for row in rows] for rows in found] for i in (0, 1))
        return Ranked(np.array(tokens, np.int32), np.array(scores, np.float32))

    def _row(
        self, text: Text, end: int, first: int, params: SamplingParams, path: list[int], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        logits = text.expected(self.network, path, end, first)[None]
        scores = perturbed_scores(logits, [params], [end + len(path)], self.names)[0].log_softmax(0)
        best, columns = scores.sort(descending=True, stable=True)
        return self.names[columns[:count].numpy()], best[:count].numpy()

    def expand(self, parents: Any, token_ids: Any) -> None:
        self.paths = [
            [[*paths[parent], token] for parent, token in zip(behind, tokens, strict=True)]
            for paths, behind, tokens in zip(self.paths, parents.tolist(), token_ids.tolist(), strict=True)
        ]


def scores_of(grown: Grown, tree: int) -> dict[tuple[int, ...], tuple[float, float]]:
    """Score and reach of each path of a tree, where there is a node."""
    paths: list[tuple[int, ...]] = []
    for token, parent, depth in zip(grown.token_ids[tree], grown.parents[tree], grown.depths, strict=True):
        above = paths[parent] if parent >= 0 else ()
        assert len(above) == depth
        paths.append((*above, int(token)))
    scores = zip(grown.scores[tree].tolist(), grown.reach[tree].tolist(), strict=True)
    return {path: both for path, both in zip(paths, scores, strict=True) if np.isfinite(both[1])}


def check(
    head: Eagle | HostEagle,
    plain: EagleHead,
    texts: Known,
    params: Sequence[SamplingParams] = (),
    *,
    depth: int = 2,
    ranks: RankTree | None = None,
    sizes: tuple[int, ...] = (),
) -> None:
    """Grow a tree below each text, and compare all nodes."""
    params = params or [GREEDY] * len(texts)
    request = TreeRequest(list(texts), params, depth, ranks, EVERYTHING, sizes)
    (pending,) = head.start([request])
    found, expected = pending.collect(), grow(Plainly(plain, texts, params), request)
    for tree in range(len(texts)):
        own, theirs = scores_of(found, tree), scores_of(expected, tree)
        own = {path: both for path, both in own.items() if len(path) <= depth or ranks is not None}
        assert own.keys() == theirs.keys()
        np.testing.assert_allclose([own[path] for path in theirs], list(theirs.values()), atol=3e-4)


@pytest.mark.parametrize("most_rows", [1, 4, 512])
def test_rows_are_those_of_plain_arithmetic(
    head: Eagle | HostEagle, plain: EagleHead, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    """Several texts of different lengths in one batch, added at once or in parts, in passes of a fixed number of
    rows."""
    monkeypatch.setattr(module, "MOST_ROWS", most_rows)
    one, other, third = Text(1, 30), Text(2, 30), Text(3, 30)
    observe(head, torch.cat([one.states, other.states]), [one.part(1, 1, 9), other.part(2, 1, 4, offset=30)])
    check(head, plain, {1: (one, 9, 1), 2: (other, 4, 1)})
    observe(head, third.states, [third.part(3, 1, 20)])
    observe(head, one.states, [one.part(1, 9, 10)])
    observe(head, other.states, [other.part(2, 4, 7)])
    check(head, plain, {3: (third, 20, 1), 1: (one, 10, 1), 2: (other, 7, 1)})


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(None, ()), (FIXED, ()), (None, (3, 5, 2))], ids=["best first", "of a shape", "of level sizes"]
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, CUT], ids=["greedy", "sampled", "cut"])
def test_trees_equal_those_of_plain_expansion(
    head: Eagle | HostEagle, plain: EagleHead, params: SamplingParams, ranks: RankTree | None, sizes: tuple[int, ...]
) -> None:
    """For texts of several lengths, then for one of them and others of the same shapes, without state of the last
    batch."""
    texts = [Text(seed, 20) for seed in range(3)]
    mixed = [params, replace(params, seed=5), GREEDY]
    for i, (text, end) in enumerate(zip(texts, (9, 4, 6), strict=True)):
        observe(head, text.states, [text.part(i, 1, end)])
    known: Known = {0: (texts[0], 9, 1), 1: (texts[1], 4, 1), 2: (texts[2], 6, 1)}
    check(head, plain, known, mixed, depth=3, ranks=ranks, sizes=sizes)
    check(head, plain, {1: known[1]}, mixed[1:2], depth=3, ranks=ranks, sizes=sizes)
    for i, text in enumerate(texts):
        observe(head, text.states, [text.part(i, 1, 11)])
    check(
        head,
        plain,
        {2: (texts[2], 11, 1), 0: (texts[0], 11, 1), 1: (texts[1], 11, 1)},
        mixed,
        depth=3,
        ranks=ranks,
        sizes=sizes,
    )


def test_requests_of_several_kinds_are_answered_together(head: Eagle | HostEagle, plain: EagleHead) -> None:
    texts = [Text(seed, 20) for seed in range(3)]
    for i, text in enumerate(texts):
        observe(head, text.states, [text.part(i, 1, 5 + i)])
    known: list[Known] = [{0: (texts[0], 5, 1), 2: (texts[2], 7, 1)}, {1: (texts[1], 6, 1)}]
    requests = [
        TreeRequest([0, 2], [GREEDY, SAMPLED], 2, None, EVERYTHING),
        TreeRequest([1], [SAMPLED], 3, FIXED, EVERYTHING),
    ]
    pending = head.start(requests)
    for own, request, one in zip(known, requests, pending, strict=True):
        found, expected = one.collect(), grow(Plainly(plain, own, request.params), request)
        for tree in range(len(own)):
            assert scores_of(expected, tree).keys() == scores_of(found, tree).keys()


def test_kernels_that_do_not_run_are_done_without(plain: EagleHead) -> None:
    """It is said once, at the start; trees are those of torch then."""
    replays = StandIn()
    head = Eagle(plain, replays)
    assert head._recorded is not None

    def fail(*_: Any) -> None:
        raise ValueError("no such instruction")

    head._recorded._passes._kernels = SimpleNamespace(texts=fail, trees=fail, most_ranked=16)  # type: ignore[assignment]
    with structlog.testing.capture_logs() as logs:
        head.warm_up(2, (), lambda _: [(3, 5, 2)])
    assert [entry["event"] for entry in logs] == ["eagle_kernels_failed"]
    recorded, text = replays.num_recorded, Text(1, 20)
    observe(head, text.states, [text.part(0, 1, 9)])
    check(head, plain, {0: (text, 9, 1)}, depth=3, sizes=(3, 5, 2))
    assert replays.num_recorded == recorded
    head._recorded._passes._cache.read = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match="no such instruction"):
        head.warm_up(4, (), lambda _: [(3, 5, 2)])


def test_passes_are_recorded_once(plain: EagleHead) -> None:
    """A shape's first batch, or the warm-up; after that they are replayed, near the end of a text too, until the cache
    moves."""
    replays = StandIn()
    head = Eagle(plain, replays)
    text = Text(1, 400)
    head.warm_up(2)
    observe(head, text.states, [text.part(i, 1, 3) for i in range(2)])
    for depth in (4, 2):
        head.start([TreeRequest([0, 1], [GREEDY, SAMPLED], depth, None, EVERYTHING)])[0].collect()
    recorded, replayed = replays.num_recorded, replays.num_replayed
    for end in range(4, 9):
        observe(head, text.states, [text.part(i, 1, end) for i in range(2)])
        head.start([TreeRequest([0, 1], [GREEDY, SAMPLED], max(8 - end, 1), None, EVERYTHING)])[0].collect()
    assert (replays.num_recorded, replays.num_replayed - replayed) == (recorded, 10)
    observe(head, text.states, [text.part(i, 1, 400) for i in range(2, 9)])
    check(head, plain, {0: (text, 8, 1)})


def test_passes_of_any_shape_leave_out_attention_that_plans_each(
    plain: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is cuDNN's. Recorded passes may have it; jobs whose sampling cuts have trees that are not recorded."""
    seen, attention = list[bool](), torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    text = Text(1, 40)
    for replays, params, expected in (
        (None, GREEDY, {False}),
        (StandIn(), GREEDY, {True}),
        (StandIn(), replace(SAMPLED, top_k=3), {True, False}),
    ):
        head = Eagle(plain, replays)
        observe(head, text.states, [text.part(0, 1, 30)])
        seen.clear()
        head.start([TreeRequest([0], [params], 3, None, EVERYTHING)])[0].collect()
        assert set(seen) == expected


def test_what_cannot_be_recorded_is_run_as_it_is(plain: EagleHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory for a recording costs time, and no trees; it is logged."""
    replays, texts = StandIn(), [Text(seed, 20) for seed in range(2)]
    head = Eagle(plain, replays)
    known: Known = {i: (text, 9, 1) for i, text in enumerate(texts)}
    for i, text in enumerate(texts):
        observe(head, text.states, [text.part(i, 1, 9)])
    check(head, plain, {0: known[0]})

    def fail(work: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(replays, "_record", fail)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            check(head, plain, known)
            check(head, plain, {1: known[1]})
    assert [entry["event"] for entry in logs] == ["cuda_graph_capture_failed"]


@pytest.mark.parametrize("head", ["as needed", "without torch"], indirect=True)
def test_what_is_less_likely_than_the_floor_may_be_left_out(head: Eagle | HostEagle) -> None:
    """Where levels are computed one by one, levels below the floor are not computed."""
    text = Text(1, 20)
    observe(head, text.states, [text.part(1, 1, 9)])
    sizes = []
    for floor in (EVERYTHING, float(np.log(0.3))):
        (pending,) = head.start([TreeRequest([1], [GREEDY], 6, None, floor)])
        sizes.append(pending.collect().depths.max() + 1)
        first = pending.collect().scores[0, pending.collect().depths == 0].max()
    assert first < np.log(0.99)
    assert sizes[0] == 6 > sizes[1]


def test_trees_leave_no_state(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """A tree without a commit, and one text asked twice without new tokens."""
    text = Text(4, 20)
    observe(head, text.states, [text.part(1, 1, 9)])
    for end in (9, 9, 13):
        observe(head, text.states, [text.part(1, 9, end)] if end > 9 else [])
        check(head, plain, {1: (text, end, 1)})


def test_what_is_known_is_skipped_and_a_gap_begins_anew(head: Eagle | HostEagle, plain: EagleHead) -> None:
    text = Text(5, 40)
    observe(head, text.states, [text.part(1, 4, 9)])  # the engine had the beginning in its cache
    check(head, plain, {1: (text, 9, 4)})
    observe(head, text.states, [text.part(1, 6, 12)])  # an evicted session's prompt comes again
    assert head.known(1) == 12
    check(head, plain, {1: (text, 12, 4)})
    observe(head, text.states, [text.part(1, 20, 30)])
    assert head.known(1) == 30
    check(head, plain, {1: (text, 30, 20)})
    observe(head, text.states, [text.part(1, 6, 12)])
    assert head.known(1) == 30


def test_rows_of_many_steps_are_taken_in_at_once(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """Where no tree was asked for meanwhile, each step's states in memory of their own."""
    text = Text(5, 90)
    for end in range(2, 80):
        observe(head, text.states[end - 2 : end - 1].clone(), [Followed(1, end - 1, [text.token_ids[end - 1]], [0])])
    check(head, plain, {1: (text, 79, 1)}, depth=1)


def test_rows_of_texts_in_one_step_are_kept_apart(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """Each step has rows of all texts, as where prompts are computed in parts: what one text waits for lies apart."""
    texts = [Text(seed, 40) for seed in range(3)]
    for first, end in ((1, 9), (9, 12), (12, 21)):
        values = torch.cat([text.states[first - 1 : end - 1] for text in texts])
        count = end - first
        observe(
            head,
            values,
            [
                Followed(i, first, text.token_ids[first:end], range(i * count, (i + 1) * count))
                for i, text in enumerate(texts)
            ],
        )
    check(head, plain, {i: (text, 21, 1) for i, text in enumerate(texts)})


@pytest.mark.slow
def test_places_are_used_again(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """By sessions that come and go; what the one before left is not seen."""
    long, short = Text(6, 300), Text(7, 10)
    for session_id in range(5):
        text, end = (long, 290) if session_id % 2 == 0 else (short, 6)
        observe(head, text.states, [text.part(session_id, 1, end)])
        check(head, plain, {session_id: (text, end, 1)})
        head.close(session_id)
        assert head.known(session_id) == 0
    head.close(77)


def test_a_text_that_is_too_long_is_known_from_later_on(
    head: Eagle | HostEagle, plain: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no tree was requested for long, and if its keys would take too much memory."""
    text = Text(8, 60)
    monkeypatch.setattr(module, "MOST_WAITING", 20)
    observe(head, text.states, [text.part(1, 1, 31)])
    assert head.known(1) == 31
    check(head, plain, {1: (text, 31, 21)})
    monkeypatch.setattr(type(head.cache), "most_rows", 16)
    observe(head, text.states, [text.part(1, 31, 43)])
    check(head, plain, {1: (text, 43, 35)})


def test_tokens_are_ranked_with_the_jobs_own_noise(head: Eagle | HostEagle) -> None:
    """At a temperature, by place; but not where the verifier draws by itself."""
    text = Text(9, 20)
    observe(head, text.states, [text.part(1, 1, 9)])
    drawn = replace(SAMPLED, strategy="probabilistic")
    assert draws_children(drawn)
    found = [
        head.start([TreeRequest([1], [params], 1, None, EVERYTHING)])[0].collect().token_ids[:, :8].tolist()
        for params in (GREEDY, SAMPLED, replace(SAMPLED, seed=4), drawn, SAMPLED)
    ]
    assert found[0] == found[3] != found[1] != found[2]
    assert found[1] == found[4]
