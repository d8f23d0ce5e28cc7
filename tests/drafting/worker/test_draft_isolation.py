"""An exception for one session costs that session's drafts and does not affect others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specq.drafting import Chains, Children, Expansion, Pending
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.worker.session import DraftSession
from specq.drafting.worker.worker import DraftWorker
from specq.protocol.arrays import Int32Array
from specq.protocol.errors import EngineLostError, ProtocolError
from specq.protocol.messages import Assign, Open, Verdict
from specq.protocol.params import SamplingParams
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyChains, ToyProposer
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve

NUM, BAD = 8, 3
LENGTH = 20


class Failing(ToyProposer):
    """Raises for one session, in one of its methods."""

    def __init__(self, where: str = "", error: Exception | None = None) -> None:
        super().__init__()
        self.where, self.error = where, error or OverflowError("too large")

    def _at(self, where: str, session_ids: Sequence[int]) -> None:
        if where == self.where and BAD in session_ids:
            raise self.error

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        self._at("open", [session_id])
        super().open(session_id, token_ids, params)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        self._at("commit", [session_id])
        super().commit(session_id, token_ids, path)

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        self._at("expand", [request.session_id for request in requests])
        return super().expand(requests)


def assign(session_id: int) -> Assign:
    return Assign(
        session_id=session_id, epoch=1, lane=0, prompt_len=2, params=SamplingParams(),
        token_ids=np.array([session_id + 1, 2], np.int32),
    )  # fmt: skip


def play(drafter: DraftWorker) -> tuple[dict[int, list[list[int]]], list[str]]:
    """Let a drafter draft for eight sessions, receive a verdict on each, and draft again; return its drafts, and
    complaints."""
    drafts: dict[int, list[list[int]]] = {i: [] for i in range(NUM)}
    complaints: list[str] = []

    def say(message: Assign | Verdict) -> None:
        try:
            drafter.handle(message)
        except ProtocolError as error:
            complaints.append(str(error))

    for i in range(NUM):
        say(assign(i))
    for part in range(2):
        for _ in range(4):
            for draft in drafter.step():
                drafts[draft.session_id].append(draft.token_ids.tolist())
        for i in range(NUM) if not part else ():
            tokens = np.array(toy_text([i + 1, 2], 2), np.int32)
            say(Verdict(session_id=i, epoch=1, base_len=2, token_ids=tokens))
    return drafts, complaints


@pytest.mark.parametrize("where", ["open", "commit", "expand"])
def test_the_other_sessions_are_drafted_for_as_ever(where: str) -> None:
    """One session is drafted for no more, also when it is assigned again, as brokers do."""
    quiet, complaints = play(DraftWorker(Failing(), incarnation=1, width=64))
    assert (complaints, all(quiet.values())) == ([], True)

    drafter = DraftWorker(Failing(where), incarnation=1, width=64)
    drafts, complaints = play(drafter)

    assert {i: d for i, d in drafts.items() if i != BAD} == {i: d for i, d in quiet.items() if i != BAD}
    assert (set(drafter.sessions), len(complaints)) == (set(range(NUM)) - {BAD}, int(where != "expand"))
    drafter.handle(assign(BAD))
    assert BAD not in drafter.sessions


@pytest.mark.parametrize("name", ["frontier", "draft", "grow"])
def test_what_a_session_of_the_drafter_raises_is_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In choosing its nodes, in growing its tree, in making its message."""
    quiet, _ = play(DraftWorker(ToyProposer(), incarnation=1, width=64))
    original = getattr(DraftSession, name)

    def raising(self: DraftSession, *arguments: Any) -> Any:
        if self.session_id == BAD:
            raise IndexError("beyond")
        return original(self, *arguments)

    monkeypatch.setattr(DraftSession, name, raising)
    drafter = DraftWorker(ToyProposer(), incarnation=1, width=64)
    drafts, _ = play(drafter)

    assert drafts == {**quiet, BAD: []}
    assert set(drafter.sessions) == set(range(NUM)) - {BAD}


class Huge(ToyProposer):
    """Drafts a token for one session that no message can hold."""

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        huge = Children(np.array([2**40]), np.array([-0.1], np.float32))
        found = zip(requests, super().expand(requests), strict=True)
        return [huge if request.session_id == BAD else children for request, children in found]


def test_a_node_that_cannot_be_sent_is_its_sessions_own() -> None:
    """The messages of a pass are made together."""
    quiet, _ = play(DraftWorker(ToyProposer(), incarnation=1, width=64))
    drafter = DraftWorker(Huge(), incarnation=1, width=64)
    drafts, _ = play(drafter)
    assert drafts == {**quiet, BAD: []}
    assert set(drafter.sessions) == set(range(NUM)) - {BAD}


def test_a_device_in_error_ends_the_drafter() -> None:
    with pytest.raises(EngineLostError, match="CUDA error"):
        play(DraftWorker(Failing("expand", EngineLostError("CUDA error")), incarnation=1))


# --- in the verifier's own process
# --------------------------------------------------------------------------------------


class FailingChains(ToyChains):
    """Raises for one session when chains are begun, or when they are fetched."""

    def __init__(self, where: str, proposer: ToyProposer) -> None:
        super().__init__(proposer)
        self.where = where

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        if self.where == "start" and BAD in session_ids:
            raise OverflowError("too large")
        self.begun_for = session_ids
        return super().start(session_ids, depth, width)

    def collect(self) -> Chains:
        chains = super().collect()
        if self.where == "collect" and BAD in self.begun_for:
            raise OverflowError("too large")
        return chains


@pytest.mark.parametrize("where", ["start", "collect", "open", "commit"])
def test_a_colocated_drafter_goes_on_with_the_others(where: str) -> None:
    """All texts are right, and the others are drafted for."""
    drafter = ColocatedSource(FailingChains(where, Failing(where)), StepCurve([1, 64], [0.0001, 0.0002]))
    curve = StepCurve([1, 64], [0.01, 0.0101])
    verifier = Verifier(ToyEngine(), curve, (drafter,), incarnation=1, measures_drafts=False)
    for i in range(NUM):
        prompt = np.array([i + 1, 2], np.int32)
        verifier.handle(
            Open(session_id=i, epoch=1, prompt_len=2, tokens_left=LENGTH, params=SamplingParams(), token_ids=prompt),
            0.0,
        )
    texts: dict[int, list[int]] = {i: [] for i in range(NUM)}
    drafted: dict[int, int] = dict.fromkeys(range(NUM), 0)
    for _ in range(10 * LENGTH):
        verifier.begin(0.0)
        verdicts = verifier.step(lambda: 0.0)
        for message in verdicts:
            assert isinstance(message, Verdict)
            texts[message.session_id] += message.token_ids.tolist()
            drafted[message.session_id] += len(message.node_ids)
    assert texts == {i: toy_text([i + 1, 2], LENGTH) for i in range(NUM)}
    assert all(drafted[i] for i in range(NUM) if i != BAD)
