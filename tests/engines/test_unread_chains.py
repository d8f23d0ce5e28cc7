"""Steps that are launched with drafted tokens which the host has not read: the same texts as without drafts, on a CPU
(where the chains are there at once, and are read late) and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting import Chains, Pending
from specq.drafting.draft_model.chain_model import ChainModel
from specq.drafting.draft_model.source import ColocatedSource
from specq.engines import Engine
from specq.engines.native import flights
from specq.engines.torch import forward as feeds
from specq.engines.torch.engine import TorchEngine
from specq.protocol.errors import SpecqError
from specq.protocol.messages import Ack, Close, Open
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import SessionStep, Tree
from specq.testing.checkpoints import VOCAB, make_checkpoint, random_tokens
from specq.verification import DeviceTokens, StepBatch, device_tokens
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from tests.devices import NEEDS_CUDA
from tests.engines.test_overlap import make_engine, opened

NUM, SLOTS = 8, 1500
DEVICES = ["cpu as a gpu", pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


class SpoiltChains:
    """Chains some of whose tokens are others than the model drafted, on the device as on the host; `tokens` are there
    before they are read."""

    def __init__(self, wait: Callable[[], Any], every: int) -> None:
        self._wait, self._every = wait, every
        found = getattr(wait, "tokens", None)
        tokens = torch.from_numpy(wait()[0].reshape(-1)) if found is None else found
        at = torch.arange(len(tokens), device=tokens.device)
        self.tokens = torch.where(at % every == every - 1, (tokens + 1) % VOCAB, tokens)

    def __call__(self) -> Any:
        tokens, scores = self._wait()
        at = np.arange(tokens.size).reshape(tokens.shape)
        return np.where(at % self._every == self._every - 1, (tokens + 1) % VOCAB, tokens), scores


class SpoiltDrafter:
    """Drafts chains as a GPU does, with wrong tokens here and there."""

    def __init__(self, drafter: Any, random: Random) -> None:
        self._drafter, self._random = drafter, random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start(self, *given: Any) -> SpoiltChains:
        return SpoiltChains(self._drafter.start(*given), self._random.choice([3, 5, 7, 1000]))


class CountedChains(ChainModel):
    """A source of chains that counts requests for chains on the device."""

    num_unread = 0

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        pending = super().start(session_ids, depth, width)

        def on_device() -> torch.Tensor | None:
            found: torch.Tensor | None = pending.on_device()
            self.num_unread += found is not None
            return found

        return Pending(pending.collect, on_device)


def make_drafter(checkpoint: Path, device: str, seed: int, width: int) -> ColocatedSource:
    chains = CountedChains(str(checkpoint), device=device[:4].strip(), dtype="float32", kv_slots=4096)
    chains.contexts._chains = SpoiltDrafter(chains.contexts.chains, Random(seed))
    levels = StepCurve([1, 64], [0.0002, 0.0002])
    return ColocatedSource(chains, levels, fan_out=width, chain=4, is_unread=True)


def opening(session_id: int, mode: str, epoch: int = 1) -> Open:
    """Return a session: some are greedy, some warm, some cut; some share a prompt; some stop, some need the host."""
    prompt = random_tokens(np.random.default_rng(session_id // 2), 20 + 13 * (session_id // 2))
    params = SamplingParams(
        temperature=0.9 * (session_id % 3 > 0), seed=session_id, ignore_eos=True,
        top_p=0.9 if session_id == NUM - 1 else 1.0, presence_penalty=0.5 * (session_id == NUM - 2),
        stop_token_ids=tuple(range(0, VOCAB, 40)) if session_id % 2 else (),
    )  # fmt: skip
    return Open(
        session_id=session_id, epoch=epoch, prompt_len=len(prompt), params=params, token_ids=prompt,
        tokens_left=5 if session_id > NUM - 3 else 40 + session_id, speculation=Speculation(mode=mode),
    )  # fmt: skip


def serve(
    engine: Engine, drafter: ColocatedSource | None, seed: int = 0, modes: Sequence[str] = ("sync", "async")
) -> dict[int, list[int]]:
    """Serve sessions that come one after the other, some of which are closed or opened again on the way; return their
    texts."""
    random, texts = Random(seed), dict[int, list[int]]()
    verifier = Verifier(
        engine, StepCurve([1, 64], [0.005, 0.0051]), [] if drafter is None else [drafter], incarnation=1,
        max_step_rows=60, measures_drafts=False,
    )  # fmt: skip
    turn, modes = 0, ["plain"] if drafter is None else modes
    while turn < 2 * NUM or verifier.has_work:
        if turn < 2 * NUM and turn % 2 == 0:
            verifier.handle(opening(turn // 2, random.choice(modes)), 0.0)
        if turn in (9, 13):
            verifier.handle(Close(session_id=turn - 9, epoch=1), 0.0)
        verifier.begin(0.0)
        if turn in (5, 11):
            verifier.handle(opening(turn // 3, modes[0], epoch=2), 0.0)
        if verifier.has_work:
            verifier.step(lambda: 0.0)
        for session in list(verifier.sessions.values()):
            verifier.handle(Ack(session_id=session.session_id, epoch=session.epoch, length=session.length), 0.0)
        turn += 1
    for session in list(verifier.sessions.values()):
        assert session.finish
        texts[session.session_id] = session.token_ids
        verifier.handle(Close(session_id=session.session_id, epoch=session.epoch), 0.0)
    verifier.begin(0.0)
    assert engine.free_slots == engine.info.kv_slots
    assert verifier.trees.num_nodes == 0
    assert drafter is None or drafter.chains.free_slots == 4096  # type: ignore[attr-defined]
    return texts


def check(checkpoint: Path, device: str, seed: int, width: int) -> None:
    """Assert that texts are the target's own, that drafts were accepted unread, and that what has KV is known by its
    tokens."""
    engine, drafter = make_engine(checkpoint, device, overlaps=True), make_drafter(checkpoint, device, seed, width)
    land, accepted = engine._collect, list[int]()

    def noted(flight: Any) -> Any:
        output = land(flight)
        if flight.unread is not None:
            accepted.append(int((output.judgements.num_tokens - 1).sum()))
        return output

    engine._collect = noted  # type: ignore[method-assign]
    drafted = serve(engine, drafter, seed)
    assert drafted == serve(make_engine(checkpoint, device, overlaps=False), None, seed)
    chains: Any = drafter.chains
    assert chains.num_unread > 10
    assert sum(accepted) > 10
    text = np.array(drafted[2], np.int32)
    assert engine.open(1, text) >= 16 * ((len(text) - 2) // 16)


@pytest.mark.parametrize(("seed", "width"), [(0, 1), (1, 3), (2, 2)])
def test_texts_are_the_targets_own(checkpoint: Path, device: str, seed: int, width: int) -> None:
    """Some chains are right, some are wrong somewhere; sessions come, stop, are closed and opened again."""
    check(checkpoint, device, seed, width)


def other_places(found: Any, places_of: Any = device_tokens.places_of) -> Any:
    places = places_of(found)
    return np.maximum(places - 1, 0)


MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "rows are fed with other tokens": (feeds, "places_of", other_places),
    "KV is noted as that of other tokens": (flights, "known_tokens", lambda found, _: np.zeros_like(found)),
    "handles are judged": (StepBatch, "known", lambda self: self),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_finds(checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: each of these mistakes is seen."""
    owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, SpecqError)):
        check(checkpoint, "cpu as a gpu", 0, 1)


def test_a_step_that_fails_is_repeated_with_what_was_read(checkpoint: Path, device: str) -> None:
    """By then the host knows what was drafted."""
    engine, drafter = make_engine(checkpoint, device, overlaps=True), make_drafter(checkpoint, device, 3, 1)
    land, failed = engine._collect, list[StepBatch]()

    def fails(flight: Any) -> Any:
        if flight.unread is not None and len(failed) < 3:
            failed.append(flight.plan.batch)
            engine._discard(flight)
            raise RuntimeError("once")
        return land(flight)

    engine._collect = fails  # type: ignore[method-assign]
    expected = serve(make_engine(checkpoint, device, overlaps=False), None)
    assert serve(engine, drafter) == expected
    assert len(failed) == 3


def test_what_cannot_be_read_is_rejected(checkpoint: Path, device: str) -> None:
    """The target's own token follows, and the sessions go on."""
    engine, drafter = make_engine(checkpoint, device, overlaps=True), make_drafter(checkpoint, device, 4, 3)
    start, failed = drafter.chains.start, list[int]()

    def started(*given: Any) -> Pending[Chains]:
        pending = start(*given)

        def fails() -> Chains:
            found = pending.collect()
            if getattr(drafter.chains, "num_unread", 0) == 5 and not failed:
                failed.append(1)
                raise RuntimeError("once")
            return found

        return Pending(fails, pending.on_device)

    drafter.chains.start = started  # type: ignore[method-assign]
    expected = serve(make_engine(checkpoint, device, overlaps=False), None)
    assert serve(engine, drafter, modes=["async"]) == expected
    assert failed


def test_a_step_may_have_none_of_what_was_drafted(checkpoint: Path, device: str) -> None:
    """It may have known nodes of other sessions. It is computed, and the tokens that are read later are discarded."""
    engine, text = make_engine(checkpoint, device, overlaps=True), [1, 2]
    opened(engine, 1)
    for _ in range(3):
        text.append(step_of(engine, text, [])[-1])
    again = make_engine(checkpoint, device, overlaps=True)
    opened(again, 1)
    drafted = DeviceTokens(torch.tensor([7], dtype=torch.int32, device=device[:4].strip()))
    assert step_of(again, text[:2], text[2:4], drafted) == text[2:]


def step_of(engine: TorchEngine, text: list[int], chain: list[int], drafted: DeviceTokens | None = None) -> list[int]:
    """Return what a step says after a text, with known tokens that were drafted, beside those which the host reads when
    it was launched."""
    parents = np.arange(-1, len(chain) - 1, dtype=np.int32)
    tree = Tree(np.array(chain, np.int32), parents, np.zeros(len(chain), np.float32))
    batch = StepBatch.of([SessionStep(0, len(text) - 1, np.array(text[-1:], np.int32), SamplingParams(), tree)])
    batch.drafted = drafted
    launched = engine.launch(batch)
    if drafted is not None:
        drafted.values = np.array([7], np.int32)
    (judgement,) = launched.collect().judgements
    return judgement.token_ids.tolist()


# --- parts ------------------------------------------------------------------------------------------------------------


def test_handles_are_no_tokens_and_are_read_as_what_they_stand_for() -> None:
    own = device_tokens.handles(np.array([2, 0]))
    assert (own < -1).all()
    assert device_tokens.places_of(own).tolist() == [2, 0]
    mixed = np.array([7, *own, 9], np.int32)
    drafted = DeviceTokens(None, np.array([30, 31, 32], np.int32))
    assert device_tokens.known_tokens(mixed, drafted).tolist() == [7, 32, 30, 9]
    with pytest.raises(AssertionError, match="before they were read"):
        device_tokens.known_tokens(own, DeviceTokens(None))
