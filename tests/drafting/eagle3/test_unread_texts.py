"""Texts are the target's own where trees of an EAGLE-3 head are verified unread, whatever the head knows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting import Pending
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.source import EagleSource
from specq.drafting.trees.grown_trees import (
    shapes_for,
)
from specq.drafting.trees.interface import DeviceNodes, Grown, TreeRequest
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.protocol import SUFFIX, SUFFIX_LANE, Close, Open, SamplingParams, Speculation, Verdict
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.conformance.sources import LENGTH, Serving
from specq.testing.growth import lines_of
from specq.testing.late import LateEngine
from specq.testing.toy import toy_text
from specq.verifier import Verifier
from specq.verifier.sessions.grafting import DraftBatch, batch_of_chains
from specq.verifier.sessions.session import Session
from specq.verifier.sources import Followed
from specq.verifier.sources.interface import Budget, DraftSource
from specq.verifier.sources.unread import UnreadLayout
from tests.devices import NEEDS_CUDA
from tests.drafting.eagle3.unread import (
    COUNTS,
    CURVE,
    DEPTH,
    SESSIONS,
    Beside,
    grown_around,
    is_read_as_on_device,
    noted,
)
from tests.drafting.medusa.test_medusa import num_accepted
from tests.engines.test_overlap import make_engine
from tests.replaying import StandIn

DEVICES = ["cpu as a gpu", pytest.param("cuda", marks=NEEDS_CUDA)]


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


# --- a target of its own
# --------------------------------------------------------------------------------------------------------


def known_trees(grown: Grown, device: torch.device) -> Pending[Grown]:
    """Return trees whose nodes a device has."""

    def on_device() -> DeviceNodes:
        nodes = grown.token_ids, lines_of(grown.parents, grown.depths)
        return DeviceNodes(*(torch.from_numpy(each.copy()).to(device) for each in nodes))

    return Pending(lambda: grown, on_device)


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
    assert head.limit_vocab <= engine.info.vocab_size
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
        assert is_read_as_on_device(head, request) == is_there
