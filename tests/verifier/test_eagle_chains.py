"""Chains of an EAGLE-3 head for many sessions: a step verifies them before the host has read them, and what is said is the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq.engines.torch import load_eagle
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.proposers import Followed, Growing, Grown, TreeRequest
from specq.proposers.eagle import Eagle
from specq.protocol import Close, Int32Array, Open, SamplingParams, Speculation, Verdict
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.conformance.sources import LENGTH, Serving
from specq.testing.late import LateEngine
from specq.testing.toy import ToyTrees, toy_text
from specq.verifier import EagleDrafter, StepCurve, Verifier, usual_chain
from specq.verifier.sources.eagle import CHAIN, MANY
from tests.devices import NEEDS_CUDA
from tests.engines.test_overlap import make_engine
from tests.replaying import StandIn
from tests.verifier.test_medusa import num_accepted

DEVICES = ["cpu as a gpu", pytest.param("cuda", marks=NEEDS_CUDA)]
CURVE = StepCurve([1, 512], [0.005, 0.0051])
SESSIONS = MANY + 4


class Beside(ToyTrees):
    """A toy head that drafts beside the host."""

    runs_beside_host = True


def noted(source: EagleDrafter) -> list[int]:
    """Let a source note the nodes that it hangs unread, of each round that has some."""
    found, of_unread = list[int](), source._batch_of_unread

    def note(*given: Any) -> Any:
        batch = of_unread(*given)
        if batch is not None:
            found.append(len(batch.token_ids))
        return batch

    source._batch_of_unread = note  # type: ignore[method-assign]
    return found


# --- a toy --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_every", [0, 2, 3, 5])
def test_many_sessions_have_chains_that_are_verified_unread(wrong_every: int) -> None:
    """From the second round on: the first says what they promise. The engine checks that what is read is what the device had."""
    source = EagleDrafter(Beside(wrong_every=wrong_every), 5)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    context = list(range(3, 12))
    for i in range(SESSIONS):
        started.open(i, seed=i, context=context)
    assert started.finish() == {i: toy_text(context, LENGTH, i) for i in range(SESSIONS)}
    assert len(unread) >= LENGTH / (CHAIN + 1) - 2
    assert max(unread) == CHAIN * SESSIONS
    accepted = sum(num_accepted(session.stats) for session in started.verifier.sessions.values())
    assert accepted > SESSIONS * LENGTH * (0.7 if not wrong_every else 0.15)


@pytest.mark.parametrize(
    ("head", "count", "options", "shape"),
    [
        (Beside(), MANY - 1, {}, {}),  # few
        (ToyTrees(), SESSIONS, {}, {}),  # the host grows trees
        (Beside(), SESSIONS, {"tree": ((0, 0), (1,))}, {}),
        (Beside(), SESSIONS, {}, {"num_candidates": 2}),
    ],
)
def test_others_are_read_first(head: ToyTrees, count: int, options: Any, shape: Any) -> None:
    source = EagleDrafter(head, 5, **options)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    for i in range(count):
        started.open(i, seed=i, context=[4, 5, 6], **shape)
    assert started.finish() == {i: toy_text([4, 5, 6], LENGTH, i) for i in range(count)}
    assert unread == []
    assert sum(num_accepted(session.stats) for session in started.verifier.sessions.values()) > 0


def test_an_engine_that_must_know_what_it_verifies_gets_chains_that_were_read() -> None:
    class Knowing(LateEngine):
        takes_unread = False

    source = EagleDrafter(Beside(wrong_every=3), 5)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=Knowing())
    for i in range(SESSIONS):
        started.open(i, seed=i, context=[4, 5, 6])
    assert started.finish() == {i: toy_text([4, 5, 6], LENGTH, i) for i in range(SESSIONS)}
    assert unread == []


# --- a target of its own --------------------------------------------------------------------------------------------------------


class KnownChains:
    """Chains whose tokens a device has."""

    def __init__(self, token_ids: Int32Array, device: torch.device) -> None:
        self._token_ids, self._device = token_ids, device

    def __call__(self) -> Grown:
        num_chains, depth = self._token_ids.shape
        scores = np.full((num_chains, depth), -0.2, np.float32)
        parents = np.broadcast_to(np.arange(-1, depth - 1, dtype=np.int32), self._token_ids.shape)
        return Grown(self._token_ids, scores, scores.cumsum(1), parents, np.arange(depth))

    def on_device(self) -> torch.Tensor:
        return torch.from_numpy(self._token_ids.T.reshape(-1).copy()).to(self._device)


class KnowingHead:
    """A head that knows the texts, and drafts every third or so of their tokens wrong."""

    layers, runs_beside_host = (1, 2), True

    def __init__(self, texts: dict[int, list[int]], engine: TorchEngine) -> None:
        self._texts, self.limit_vocab, self._device = texts, engine.info.num_tokens, engine._device
        self._ends: dict[int, int] = {}

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

    def start(self, requests: Sequence[TreeRequest]) -> list[Growing]:
        return [KnownChains(np.array([self._chain(i, one.depth) for i in one.session_ids], np.int32), self._device) for one in requests]  # fmt: skip

    def _chain(self, session_id: int, depth: int) -> list[int]:
        end = self._ends[session_id]
        own = [*self._texts[session_id], *[9] * depth][end : end + depth]
        return [(token + (end + i + session_id) % 5 // 4) % self.limit_vocab for i, token in enumerate(own)]


def openings(mode: str) -> list[Open]:
    """Greedy and warm sessions, some of which share a prompt, of unequal lengths."""
    found = []
    for i in range(SESSIONS):
        prompt = np.random.default_rng(i // 2).integers(1, 4000, 9 + 7 * (i // 2)).astype(np.int32)
        params = SamplingParams(temperature=0.8 * (i % 3 == 1), seed=i, ignore_eos=True)
        found.append(
            Open(session_id=i, epoch=1, prompt_len=len(prompt), tokens_left=20 + i, params=params, token_ids=prompt,
                 speculation=Speculation(mode=mode))
        )  # fmt: skip
    return found


def serve(verifier: Verifier, mode: str, *, closes: bool = False) -> dict[int, list[int]]:
    """Return the whole texts of all sessions; one comes with each of the last turns, and one of the first is closed on the way."""
    late, texts = openings(mode), dict[int, list[int]]()
    for message in late[: MANY + 1]:
        verifier.handle(message, 0.0)
        texts[message.session_id] = message.token_ids.tolist()
    late = late[MANY + 1 :]
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
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_texts_are_the_targets_own(tiny: Path, plain: dict[int, list[int]], device: str, mode: str) -> None:
    """Chains that are right and wrong, of sessions that come and are closed while they are drafted; KV is known by the tokens that it is of."""
    engine = make_engine(tiny, device, overlaps=True)
    source = EagleDrafter(KnowingHead(plain, engine), 6)
    unread = noted(source)
    verifier = Verifier(
        engine, CURVE, [source], incarnation=1, max_sessions=64, max_step_rows=512, measures_drafts=False
    )
    found = serve(verifier, mode, closes=True)
    assert plain[0][: len(found[0])] == found.pop(0)
    assert found == {i: text for i, text in plain.items() if i}
    assert (sum(unread) > 100) == (mode == "async")
    assert engine.free_slots == engine.info.kv_slots
    text = np.array(plain[5], np.int32)
    assert engine.open(99, text) >= 16 * ((len(text) - 2) // 16)


def test_the_check_finds_tokens_that_are_read_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine's check is worth, with which the tests above run."""
    read = EagleDrafter._read

    def other_order(self: EagleDrafter, begun: Any) -> Grown:
        grown = read(self, begun)
        return grown._replace(token_ids=grown.token_ids[::-1])

    monkeypatch.setattr(EagleDrafter, "_read", other_order)
    with pytest.raises(AssertionError):
        test_many_sessions_have_chains_that_are_verified_unread(3)


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as needed", "recorded"])
def test_a_heads_chains_are_on_the_device_as_they_are_read(tiny: Path, tmp_path: Path, *, is_recorded: bool) -> None:
    """Where its trees are recorded, and are chains."""
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
    chain, tree, cut = (
        TreeRequest(*asked, depth=3, ranks=usual_chain(3), floor=-9.0),
        TreeRequest(*asked, depth=3, ranks=None, floor=-9.0),
        TreeRequest(
            asked[0], [SamplingParams(temperature=0.8, top_k=3)] * 5, depth=3, ranks=usual_chain(3), floor=-9.0
        ),
    )
    for request, is_there in ((chain, is_recorded), (tree, False), (cut, False)):
        (growing,) = head.start([request])
        tokens = growing.on_device()
        assert (tokens is not None) == is_there
        if tokens is not None:
            assert tokens.tolist() == growing().token_ids.T.reshape(-1).tolist()
            assert max(tokens.tolist()) < head.limit_vocab <= engine.info.vocab_size
