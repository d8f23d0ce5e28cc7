"""Trees of an EAGLE-3 head that a step verifies before the host has read them: what is said is the target's own, and
nodes hang where they stood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting import Pending
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.grown_trees import (
    SHAPES,
    UsualReach,
    batch_of_unread,
    best_shape,
    put_read,
    shapes_for,
)
from specq.drafting.eagle3.interface import BEAM, DeviceNodes, Grown, TreeRequest
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.source import EagleSource
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.protocol import EAGLE_LANE, SUFFIX, SUFFIX_LANE, Close, Open, SamplingParams, Speculation, Verdict
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.conformance.sources import LENGTH, Serving
from specq.testing.growth import lines_of
from specq.testing.late import LateEngine
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyTrees
from specq.verification import DeviceLines, DeviceTokens
from specq.verifier import StepCurve, Verifier
from specq.verifier.sessions.grafting import DraftBatch, batch_of_chains, graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.sources import Followed
from specq.verifier.sources.interface import Budget, DraftSource
from specq.verifier.sources.unread import UnreadLayout
from specq.verifier.trees import NONE, DraftTrees
from tests.devices import NEEDS_CUDA
from tests.drafting.medusa.test_medusa import num_accepted
from tests.engines.test_overlap import make_engine
from tests.replaying import StandIn
from tests.verifier.sessions import paths
from tests.verifier.test_sources import remote

DEVICES = ["cpu as a gpu", pytest.param("cuda", marks=NEEDS_CUDA)]
CURVE = StepCurve([1, 512], [0.005, 0.0051])
COUNTS = [1, 3, 20]
SESSIONS = max(COUNTS)
DEPTH = 6
CONTEXT = np.array([4, 5, 6], np.int32)


class Beside(ToyTrees):
    """A toy head that drafts beside the host."""

    runs_beside_host = True


def noted(source: EagleSource) -> list[int]:
    """Let a source note the nodes that it hangs unread, of each round that has some."""
    found, of_unread = list[int](), source._batch_of_unread

    def note(*given: Any) -> Any:
        batch = of_unread(*given)
        if batch is not None:
            found.append(len(batch.token_ids))
        return batch

    source._batch_of_unread = note  # type: ignore[method-assign]
    return found


# --- a toy
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("wrong_every", [0, 2, 3, 5])
def test_trees_are_verified_unread(wrong_every: int, count: int) -> None:
    """From the second round on: the first says what they promise. The engine checks that what is read is what the
    device had."""
    source = EagleSource(Beside(wrong_every=wrong_every), DEPTH)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    context = list(range(3, 12))
    for i in range(count):
        started.open(i, seed=i, context=context)
    assert started.finish() == {i: toy_text(context, LENGTH, i) for i in range(count)}
    assert len(unread) >= LENGTH / (DEPTH + 1) - 2
    assert max(unread) in [count * sum(shape) for shape in shapes_for(count, DEPTH)]
    accepted = sum(num_accepted(session.stats) for session in started.verifier.sessions.values())
    assert accepted > count * LENGTH * (0.7 if not wrong_every else 0.15)
    usual = source._shapes.usual.of(UnreadLayout.of((1,)))
    assert usual is not None
    assert wrong_every or usual[0] > 0.72  # the head says 0.7


@pytest.mark.parametrize(
    ("head", "count", "options", "shape"),
    [
        (ToyTrees(), SESSIONS, {}, {}),  # the host grows trees
        (Beside(), SESSIONS, {"tree": ((0, 0), (1,))}, {}),
        (Beside(), SESSIONS, {}, {"num_candidates": 2}),
    ],
)
def test_others_are_read_first(head: ToyTrees, count: int, options: Any, shape: Any) -> None:
    source = EagleSource(head, 5, **options)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    for i in range(count):
        started.open(i, seed=i, context=[4, 5, 6], **shape)
    assert started.finish() == {i: toy_text([4, 5, 6], LENGTH, i) for i in range(count)}
    assert unread == []
    assert sum(num_accepted(session.stats) for session in started.verifier.sessions.values()) > 0


def test_others_of_the_step_may_have_nodes_that_are_known() -> None:
    """Of sessions that are drafted for by somebody else: what becomes of these is nothing that a head learns from."""
    next_ids = Counter[int]()

    def feed(verifier: Verifier) -> None:
        for session in verifier.sessions.values():
            if session.session_id % 2 and session.takes_drafts:
                tokens = toy_text(session.token_ids, 40, session.params.seed)
                verifier.handle(remote(session, 0, next_ids[session.session_id], tokens), 0.0)
                next_ids[session.session_id] += len(tokens)

    source = EagleSource(Beside(wrong_every=1, blind=True), DEPTH)
    unread, started = noted(source), Serving([source], feed, engine=LateEngine())
    for i in range(4):
        started.open(i, seed=i)
        if i % 2:
            source.refuse(started.verifier.sessions[i])
    assert started.finish() == {i: toy_text([5, 6, 7], LENGTH, i) for i in range(4)}
    assert len(unread) > 20
    assert source in started.verifier.sources.sources
    accepted = [num_accepted(started.verifier.sessions[i].stats) for i in range(4)]
    assert accepted[::2] == [0, 0]
    assert min(accepted[1::2]) > 30
    usual = source._shapes.usual.of(UnreadLayout.of((1,)))
    assert usual is not None
    assert usual[0] < 0.4


def test_unverified_trees_teach_no_acceptance_rates() -> None:
    """Least of all from the nodes of the next step, which others have drafted."""
    source = EagleSource(Beside(), DEPTH)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    for i in range(3):
        started.open(i, seed=i)
    while not unread:
        started.turn()
    started.verifier.planner.max_step_rows = 3  # there is room for no node
    num_unread = len(unread)
    started.turn()
    assert len(unread) == num_unread + 1
    started.verifier.planner.max_step_rows = 512
    for session in started.verifier.sessions.values():
        tokens = toy_text(session.token_ids, 40, session.params.seed)
        started.verifier.handle(remote(session, 0, 0, tokens), 0.0)
    assert started.finish() == {i: toy_text([5, 6, 7], LENGTH, i) for i in range(3)}
    assert source in started.verifier.sources.sources


def test_an_engine_that_must_know_what_it_verifies_gets_chains_that_were_read() -> None:
    class Knowing(LateEngine):
        takes_unread = False

    source = EagleSource(Beside(wrong_every=3), 5)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=Knowing())
    for i in range(SESSIONS):
        started.open(i, seed=i, context=[4, 5, 6])
    assert started.finish() == {i: toy_text([4, 5, 6], LENGTH, i) for i in range(SESSIONS)}
    assert unread == []


# --- a target of its own
# --------------------------------------------------------------------------------------------------------


def known_trees(grown: Grown, device: torch.device) -> Pending[Grown]:
    """Return trees whose nodes a device has."""

    def on_device() -> DeviceNodes:
        nodes = grown.token_ids, lines_of(grown.parents, grown.depths)
        return DeviceNodes(*(torch.from_numpy(each.copy()).to(device) for each in nodes))

    return Pending(lambda: grown, on_device)


def grown_around(
    texts: Sequence[Sequence[int]], level_sizes: Sequence[int], limit: int, rng: np.random.Generator
) -> Grown:
    """Trees in which what texts go on with stands at random places of the levels, down to a random one, below its own;
    other nodes stand anywhere, and some of them have its tokens, too."""
    layout, size = UnreadLayout.of(tuple(level_sizes)), sum(level_sizes)
    token_ids, parents = np.zeros((2, len(texts), size), np.int32)
    firsts = np.cumsum([0, *level_sizes])
    for tree, text in enumerate(texts):
        right, most = -1, rng.integers(0, len(level_sizes) + 1)
        for level, (first, num) in enumerate(zip(firsts, level_sizes, strict=False)):
            below = firsts[level - 1] + np.arange(min(level_sizes[level - 1], BEAM)) if level else np.array([-1])
            tokens, above = token_ids[tree, first : first + num], parents[tree, first : first + num]
            tokens[:], above[:] = (text[level] + 1 + np.arange(num)) % limit, rng.choice(below, num)
            taken = {right}  # nodes with a child of this token, and the one whose child is right
            for i in rng.permutation(num).tolist():
                if above[i] not in taken and rng.random() < 0.7:
                    tokens[i] = text[level]
                    taken.add(int(above[i]))
            place = int(rng.integers(0, min(num, BEAM)))
            if level < most:
                tokens[place], above[place] = text[level], right
                right = first + place
            else:
                right = size  # there is none
    reach = -0.1 - 0.3 * np.broadcast_to(layout.levels + layout.ranks, token_ids.shape).astype(np.float32)
    return Grown(token_ids, np.full(token_ids.shape, -0.3, np.float32), reach, parents, layout.levels)


class KnowingHead:
    """A head that knows the texts."""

    layers, runs_beside_host = (1, 2), True

    def __init__(self, texts: dict[int, list[int]], engine: TorchEngine) -> None:
        self._texts, self.limit_vocab, self._device = texts, engine.info.num_tokens, engine._device
        self._ends: dict[int, int] = {}
        self._rng = np.random.default_rng(1)

    def observe(self, values: Any, followed: Sequence[Followed]) -> None:
        for one in followed:
            assert max(one.rows) < len(values)
            assert one.first <= self._ends.get(one.session_id, one.first)
            end = self._ends[one.session_id] = one.first + len(one.token_ids)
            assert list(one.token_ids) == self._texts[one.session_id][one.first : end]

    def known(self, session_id: int) -> int:
        return self._ends.get(session_id, 0)

    def close(self, session_id: int) -> None:
        self._ends.pop(session_id, None)

    def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
        return [known_trees(self._grown(one), self._device) for one in requests]

    def _grown(self, request: TreeRequest) -> Grown:
        level_sizes = request.level_sizes or (1,) * request.depth  # of synchronous sessions
        num_levels = len(level_sizes)
        texts = [[*self._texts[i][self._ends[i] :], *[9] * num_levels] for i in request.session_ids]
        return grown_around(texts, level_sizes, self.limit_vocab, self._rng)


def openings(mode: str, count: int) -> list[Open]:
    """Greedy and sampled sessions of unequal lengths. Some share a prompt."""
    found = []
    for i in range(count):
        prompt = np.random.default_rng(i // 2).integers(1, 4000, 9 + 7 * (i // 2)).astype(np.int32)
        params = SamplingParams(temperature=0.8 * (i % 3 == 1), seed=i, ignore_eos=True)
        found.append(
            Open(session_id=i, epoch=1, prompt_len=len(prompt), tokens_left=20 + i, params=params, token_ids=prompt,
                 speculation=Speculation(mode=mode))
        )  # fmt: skip
    return found


def serve(
    verifier: Verifier, mode: str, count: int = SESSIONS, *, closes: bool = False, lengths: list[int] | None = None
) -> dict[int, list[int]]:
    """Return the whole texts of all sessions; note how many tokens each round gave. One comes with each of the last
    turns, and one of the first is closed on the way."""
    late, texts = openings(mode, count), dict[int, list[int]]()
    for message in late[: count - 2]:
        verifier.handle(message, 0.0)
        texts[message.session_id] = message.token_ids.tolist()
    late = late[max(count - 2, 0) :]
    for turn in range(400):
        verifier.begin(0.0)
        if late and turn > 2:
            message = late.pop()
            verifier.handle(message, 0.0)
            texts[message.session_id] = message.token_ids.tolist()
        if turn == 6 and closes:
            verifier.handle(Close(session_id=0, epoch=1), 0.0)
        for verdict in verifier.step(lambda: 0.0) if verifier.has_work else ():
            assert isinstance(verdict, Verdict), verdict
            texts[verdict.session_id] += verdict.token_ids.tolist()
            if lengths is not None:
                lengths.append(len(verdict.token_ids))
        if not late and all(session.finish for session in verifier.sessions.values()):
            for session_id in list(verifier.sessions):
                verifier.handle(Close(session_id=session_id, epoch=1), 0.0)
            return texts
    raise AssertionError("the sessions never end")


@pytest.fixture(scope="module")
def tiny() -> Path:
    return Path(resolve_model("tiny", "target"))


@pytest.fixture(scope="module")
def plain(tiny: Path) -> dict[int, list[int]]:
    engine = make_engine(tiny, "cpu", overlaps=False)
    return serve(Verifier(engine, CURVE, incarnation=1, max_sessions=64, max_step_rows=512), "plain")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "count"), [*(("async", count) for count in COUNTS), ("sync", SESSIONS)])
def test_texts_are_the_targets_own(tiny: Path, plain: dict[int, list[int]], device: str, mode: str, count: int) -> None:
    """Trees that are right and wrong, of sessions that come and are closed while they are drafted; KV is known by the
    tokens that it is of."""
    engine = make_engine(tiny, device, overlaps=True)
    source = EagleSource(KnowingHead(plain, engine), DEPTH)
    unread = noted(source)
    verifier = Verifier(
        engine, CURVE, [source], incarnation=1, max_sessions=64, max_step_rows=512, measures_drafts=False
    )
    lengths = list[int]()
    found = serve(verifier, mode, count, closes=count == SESSIONS, lengths=lengths)
    assert plain[0][: len(found[0])] == found.pop(0)
    assert found == {i: plain[i] for i in range(1, count)}
    assert (sum(unread) > 20 * count) == (mode == "async")
    assert np.mean(lengths) > 2.2
    assert engine.free_slots == engine.info.kv_slots
    text = np.array(plain[count - 1], np.int32)
    assert engine.open(99, text) >= 16 * ((len(text) - 2) // 16)


def test_nan_nodes_are_dropped_and_not_learned() -> None:
    """A head with a numeric overflow drafts no node there. Later acceptance rates do not change."""

    class Overflowing(Beside):
        count = 0

        def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
            self.count += 1
            found = super().start(requests)
            return found if self.count % 3 else [Pending(partial(spoilt, one), one.on_device) for one in found]

    def spoilt(pending: Pending[Grown]) -> Grown:
        grown = pending.collect()
        nothing = np.where(np.arange(grown.reach.shape[1]) >= 2, np.float32(np.nan), np.float32(0))
        return grown._replace(scores=grown.scores + nothing, reach=grown.reach + nothing)

    source = EagleSource(Overflowing(), DEPTH)
    usual, is_known = source._shapes.usual, list[bool]()
    promise = usual.promise

    def note(layout: UnreadLayout, reach: Any) -> None:
        promise(layout, reach)
        is_known.append(not np.isnan(usual._promised).any())

    usual.promise = note  # type: ignore[method-assign]
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    for i in range(3):
        started.open(i, seed=i, context=[4, 5, 6])
    assert started.finish() == {i: toy_text([4, 5, 6], LENGTH, i) for i in range(3)}
    assert len(unread) > 3
    assert all(is_known)


class ReadChains(DraftSource):
    """Drafts for every third session what its text goes on with, where the third token is another."""

    name = SUFFIX

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self._texts = texts

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Any) -> Sequence[DraftBatch]:
        own = [one for one in sessions if one.session_id % 3 == 1 and one.limit - one.length > 4]
        ahead = [self._texts[one.session_id][one.length :][:4] for one in own]
        tokens = np.array([[*right[:2], right[2] + 1, right[3]] for right in ahead], np.int32).reshape(-1, 4)
        scores, counts = np.full(tokens.shape, -0.1), np.full(len(own), 4)
        return [batch_of_chains(own, SUFFIX_LANE, tokens, counts, scores, is_measured=True)] if own else []


class KnowingSome(KnowingHead):
    """Has no states for every third text."""

    def known(self, session_id: int) -> int:
        return 0 if session_id % 3 == 1 else super().known(session_id)


@pytest.mark.parametrize("device", DEVICES)
def test_beside_sessions_whose_drafts_were_read(tiny: Path, plain: dict[int, list[int]], device: str) -> None:
    """Whose lines the host has laid out, and which stay as they are."""
    engine = make_engine(tiny, device, overlaps=True)
    chains, source = ReadChains(plain), EagleSource(KnowingSome(plain, engine), DEPTH)
    unread, lengths, count = noted(source), list[int](), 4
    verifier = Verifier(
        engine, CURVE, [chains, source], incarnation=1, max_sessions=64, max_step_rows=512, measures_drafts=False
    )
    found = serve(verifier, "async", count, lengths=lengths)
    assert found == {i: plain[i] for i in range(count)}
    assert len(unread) > 3
    assert np.mean(lengths) > 2.2


def test_the_check_finds_tokens_that_are_read_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine's check is worth, with which the tests above run."""
    read = EagleSource._read

    def other_order(self: EagleSource, begun: Any) -> Grown:
        grown = read(self, begun)
        return grown._replace(token_ids=grown.token_ids[:, ::-1])

    monkeypatch.setattr(EagleSource, "_read", other_order)
    with pytest.raises(AssertionError):
        test_trees_are_verified_unread(3, 3)


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as needed", "recorded"])
def test_a_heads_trees_are_on_the_device_as_they_are_read(tiny: Path, tmp_path: Path, *, is_recorded: bool) -> None:
    """Where they are recorded, and their level sizes were given."""
    engine = TorchEngine(str(tiny), device="cpu", kv_slots=64)
    tokenizer = {"num_tokens": engine.info.num_tokens, "tokenizer_hash": engine.info.tokenizer_hash}
    heads = make_eagle(
        tmp_path / "eagle", eagle_shape_of(256, engine.info.vocab_size, 300, **tokenizer), embedding=False
    )
    head = Eagle(load_eagle(str(heads), str(tiny), engine.info, "cpu"), StandIn() if is_recorded else None)
    assert head.runs_beside_host == is_recorded
    values = torch.randn(40, head.network.fc.in_features)
    head.observe(values, [Followed(i, 1, [5 + i, 6, 7], [i, 10 + i, 20 + i]) for i in range(5)])
    asked = list(range(5)), [SamplingParams(temperature=0.8 * (i % 2), seed=i) for i in range(5)]
    sized, tree, cut = (
        TreeRequest(*asked, depth=3, ranks=None, floor=-9.0, level_sizes=(3, 5, 2)),
        TreeRequest(*asked, depth=3, ranks=None, floor=-9.0),
        TreeRequest(
            asked[0],
            [SamplingParams(temperature=0.8, top_k=3)] * 5,
            depth=3,
            ranks=None,
            floor=-9.0,
            level_sizes=(3, 5, 2),
        ),
    )
    for request, is_there in ((sized, is_recorded), (tree, False), (cut, False)):
        (growing,) = head.start([request])
        nodes = growing.on_device()
        assert (nodes is not None) == is_there
        if nodes is not None:
            grown = growing.collect()
            assert nodes.token_ids.tolist() == grown.token_ids.tolist()
            assert nodes.token_ids.max() < head.limit_vocab <= engine.info.vocab_size
            deep = np.broadcast_to(np.arange(3)[:, None, None] <= grown.depths, nodes.lines.shape)
            assert np.array_equal(nodes.lines.numpy()[deep], lines_of(grown.parents, grown.depths)[deep])


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_what_was_read_hangs_where_it_stood(seed: int, is_compiled: bool) -> None:
    """Of some sessions all levels, of some the first, of some nothing; of one that has nodes of its own, and of one
    whose drafts were forgotten."""
    rng, trees = np.random.default_rng(seed), DraftTrees(is_compiled=is_compiled)
    shape, depths = (3, 4, 2, 1, 2), rng.permutation([5, 5, 2, 0, 1])
    sessions = [
        Session(
            Open(session_id=i, epoch=1, prompt_len=3, tokens_left=50, params=SamplingParams(), token_ids=CONTEXT),
            trees=trees,
        )
        for i in range(len(depths) + 1)
    ]
    grown = grown_around([[7, 8, 9, 10, 11]] * len(depths), shape, 40, rng)
    lines = DeviceLines(None, sum(shape), grown.parents.reshape(-1))
    drafted = DeviceTokens(None, grown.token_ids.reshape(-1), lines)
    layout, likely = UnreadLayout.of(shape), 0.9 ** np.arange(1, 13)
    other = batch_of_chains(sessions[-1:], EAGLE_LANE, np.array([[7, 8]], np.int32), np.array([2]), np.zeros((1, 2)),
    is_measured=True)  # fmt: skip
    graft_batch(other, 0.0)
    graft_batch(batch_of_unread(sessions[:-1], drafted, layout, depths, likely, EAGLE_LANE), 0.0)
    forgotten = int(depths.argmax())
    sessions[forgotten].forget_drafts()
    depths[forgotten] = 0
    is_free = trees.length == NONE
    roots = trees.first_root[is_free]
    put_read(trees, drafted, grown)
    assert np.array_equal(trees.first_root[is_free], roots)
    for i, depth in enumerate(depths.tolist()):
        expected: dict[int, tuple[int, ...]] = {-1: ()}
        for node in np.flatnonzero(layout.levels < depth).tolist():
            expected[node] = (*expected[int(grown.parents[i, node])], int(grown.token_ids[i, node]))
        assert paths(sessions[i]) == set(expected.values()) - {()}
    assert paths(sessions[-1]) == {(7,), (7, 8)}
    for session in sessions:
        session.close()
    assert trees.num_nodes == 0


# --- the rule
# -----------------------------------------------------------------------------------------------------------------


def test_no_node_is_likelier_than_the_one_before() -> None:
    """So the first nodes of each tree are chosen, for any observations."""
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        layout, usual = UnreadLayout.of(shape), UsualReach(8, 5)
        assert usual.of(layout) is None
        for _ in range(5):
            usual.promise(layout, rng.random((3, len(layout.levels))))
            counts = rng.integers(0, len(layout.levels) + 1, 3)
            usual.learn(layout, counts, rng.random(counts.sum()) < 0.5)
            likely = usual.of(layout)
            assert likely is not None
            assert (np.diff(likely) < 0).all()
            assert 0 < likely[-1] <= likely[0] < 1


def test_what_became_of_nodes_outweighs_what_was_said_of_them() -> None:
    """By level and place, in trees of other shapes too."""
    layout, usual = UnreadLayout.of((2, 1, 1)), UsualReach(8, 5)
    usual.promise(layout, np.full((4, 4), 0.5))
    for _ in range(200):
        usual.learn(layout, np.array([4, 3]), np.array([1, 0, 1, 1, 1, 0, 0], np.bool_))
    found, chain = usual.of(layout), usual.of(UnreadLayout.of((1, 1)))
    assert found is not None
    assert chain is not None
    np.testing.assert_allclose(found, [0.97, 0.88, 0.5, 0.04], atol=0.1)
    np.testing.assert_allclose(chain, found[[0, 2]], atol=0.02)


@pytest.mark.parametrize(
    ("accepted", "num_sessions", "slope", "best"),
    [
        (0.9, 1, 0.0, SHAPES[3]),
        (0.9, 64, 0.0, SHAPES[0]),  # there is no room for others
        (0.9, 8, 0.002, SHAPES[0]),
        (0.05, 1, 0.0, SHAPES[0]),
    ],
)
def test_the_best_shape_is_the_one_with_most_tokens_a_second(
    accepted: float, num_sessions: int, slope: float, best: tuple[int, ...]
) -> None:
    usual = UsualReach(8, 5)
    assert best_shape(num_sessions, 8, usual, CURVE) == shapes_for(num_sessions, 8)[-1]
    for shape in SHAPES:
        layout = UnreadLayout.of(shape)
        usual.promise(layout, (accepted ** (1 + layout.levels) / (1 + layout.ranks) ** 2)[None])
    curve = StepCurve([1, 512], [0.005, 0.005 + 511 * slope])
    assert best_shape(num_sessions, 8, usual, curve) == best


def test_trees_of_few_levels_are_those_of_many_cut_off() -> None:
    assert shapes_for(1, 3) == [(1, 1, 1), (2, 1, 1), (3, 3, 2), (5, 4, 4)]
    assert shapes_for(1, 1) == [(1,), (2,), (3,), (5,)]
    assert shapes_for(64, 8) == [SHAPES[0]]
