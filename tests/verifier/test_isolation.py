"""One session's fault, wherever it strikes, is that session's alone: the others' texts and retries are as if it were
not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting.suffix.source import SuffixDecoder
from specq.protocol.errors import EngineError, EngineLostError
from specq.protocol.messages import Close, Draft, Open, SessionFailed
from specq.protocol.params import SamplingParams
from specq.protocol.step_output import NO_TAP, StepOutput, Tap
from specq.runtime.isolation import Faults, in_halves
from specq.testing.toy import ToyEngine, toy_text
from specq.text.detokenizer import StopMatcher
from specq.verification.devices import check_alive
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grafting import graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.sources import Budget, DraftBatch, DraftSource, source_set
from specq.verifier.step import node_choice, plan
from specq.verifier.trees import MAX_END_IDS, DraftTrees
from tests.verifier.isolation import LENGTH, NUM, Steps, make_verifier, open_all, run
from tests.verifier.sessions import graft, make_draft, make_session

MAGIC = 49


class Broken(ToyEngine):
    """Its steps raise where a session's tokens have the magic one, before or after half of the others were computed."""

    error: Exception = ValueError("what a user sent")

    def step(self, steps: Steps, tap: Tap = NO_TAP) -> StepOutput:
        if any(MAGIC in step.token_ids.tolist() for step in steps):
            raise self.error
        return super().step(steps, tap)


# --- what raises for one of eight
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(NUM))
@pytest.mark.parametrize("kinds", [(SuffixDecoder,), ()], ids=["suffix", "alone"])
def test_a_step_that_raises_for_one_session_fails_that_one(place: int, kinds: tuple[type[SuffixDecoder], ...]) -> None:
    """Wherever among the sessions it is, the others end with their texts, no step lost, none handed back."""
    prompts = [[i + 1, 2, MAGIC if i == place else 3] for i in range(NUM)]
    verifier = make_verifier(Broken(), sources=[kind() for kind in kinds])
    open_all(verifier, prompts, ignore_eos=True)

    texts, failed = run(verifier)

    assert list(failed) == [place]
    assert (failed[place].retry, failed[place].reason) == (
        True,
        "the session could not be computed: ValueError: what a user sent",
    )
    for i in set(range(NUM)) - {place}:
        assert texts[i] == toy_text(prompts[i], LENGTH)


def test_several_at_once_are_all_found() -> None:
    """A fault in each half, and two side by side."""
    prompts = [[i + 1, 2, MAGIC if i in (0, 1, 5) else 3] for i in range(NUM)]
    verifier = make_verifier(Broken())
    open_all(verifier, prompts)

    texts, failed = run(verifier)

    assert sorted(failed) == [0, 1, 5]
    assert all(texts[i] == toy_text(prompts[i], LENGTH) for i in (2, 3, 4, 6, 7))


PLACES: dict[str, tuple[object, str]] = {
    "planned": (plan, "choose_nodes"),
    "shared": (Session, "history"),
    "cut": (Session, "up_to_end"),
    "opened": (ToyEngine, "open"),
}


@pytest.mark.parametrize("where", PLACES)
def test_what_raises_for_one_session_fails_that_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan, the commit, the engine's opening: the same."""
    owner, name = PLACES[where]
    original = getattr(owner, name)

    def raising(self: Any, *arguments: Any) -> Any:
        ids = self if isinstance(self, list) else [self, *arguments]
        if 3 in [getattr(one, "session_id", one) for one in ids if isinstance(one, Session | int)]:
            raise OverflowError("too large")
        return original(self, *arguments)

    prompts = [[i + 10, 2, 3] for i in range(NUM)]
    verifier = make_verifier(ToyEngine())
    ends = tuple(range(101, 101 + MAX_END_IDS))
    looked_at = {"presence_penalty": 0.1, "stop_token_ids": ends}  # one by one, which few sessions are
    open_all(verifier, prompts, **looked_at)
    if where == "planned":
        for session in verifier.sessions.values():
            graft(session, draft_for(session.session_id, [7]), 0.0)
    monkeypatch.setattr(owner, name, raising)

    texts, failed = run(verifier)

    assert (list(failed), failed[3].retry, "OverflowError: too large" in failed[3].reason) == ([3], False, True)
    assert all(texts[i] == toy_text(prompts[i], LENGTH) for i in set(range(NUM)) - {3})


def draft_for(session_id: int, tokens: list[int]) -> Draft:
    return Draft(
        session_id=session_id, epoch=1, lane=0, base_len=3, first_id=0, token_ids=np.array(tokens, np.int32),
        parent_ids=np.arange(len(tokens), dtype=np.int32) - 1, scores=np.full(len(tokens), -0.1, np.float16),
    )  # fmt: skip


def test_a_session_that_cannot_be_opened_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop strings' matcher raises: the broker is notified why, and others open."""

    def raising(self: Any, tokens: Any) -> int:
        raise IndexError("token 9")

    monkeypatch.setattr(StopMatcher, "push", raising)
    verifier = make_verifier(ToyEngine())
    verifier.inbox.codec = object()  # type: ignore[assignment]
    monkeypatch.setattr("specq.verifier.sessions.session.StopMatcher.__init__", lambda self, *arguments: None)
    message = Open(
        session_id=7, epoch=4, prompt_len=1, tokens_left=5, params=SamplingParams(stop=("x",)),
        token_ids=np.array([1], np.int32),
    )  # fmt: skip
    (failed,) = verifier.handle(message, 0.0)
    assert isinstance(failed, SessionFailed)
    assert (failed.session_id, failed.epoch, failed.retry, verifier.sessions) == (7, 4, False, {})
    assert "IndexError" in failed.reason


def test_a_draft_that_cannot_be_grafted_costs_only_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter is not trusted: the session goes on without what was drafted for it."""
    verifier = make_verifier(ToyEngine())
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])

    def raising(batch: DraftBatch, now: float) -> None:
        graft_batch(batch, now)
        raise KeyError(batch.lanes)

    monkeypatch.setattr(source_set, "graft_batch", raising)
    verifier.handle(draft_for(0, [7, 8]), 0.0)
    texts, failed = run(verifier)
    assert (verifier.sessions[0].num_live, verifier.trees.num_nodes) == (0, 0)
    assert (texts, failed) == ({0: toy_text([1, 2, 3], LENGTH), 1: toy_text([4, 5, 6], LENGTH)}, {})


def test_a_text_that_raises_costs_only_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once for that session, and for the others on."""
    source, asked = SuffixDecoder(), list[int]()
    begin_text = source._texts.open

    def raising(place: int, *limits: int) -> None:
        asked.append(place)
        if place == verifier.sessions[0].place:
            raise OverflowError("too large")
        begin_text(place, *limits)

    monkeypatch.setattr(source._texts, "open", raising)
    verifier = make_verifier(ToyEngine(), sources=(source,), measures_drafts=False)
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])
    places = [verifier.sessions[i].place for i in (0, 1)]
    texts, failed = run(verifier)
    assert (texts, failed) == ({0: toy_text([1, 2, 3], LENGTH), 1: toy_text([4, 5, 6], LENGTH)}, {})
    assert sorted(asked) == sorted(places)
    assert [place in source._texts for place in places] == [False, True]


def test_what_others_promise_for_one_session_costs_only_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tree cannot be weighed: nothing is hung beside it, and the other session is drafted for."""
    trees = DraftTrees()
    context = [*range(10, 32), 1, 2, 3, 10, 11, 12]
    sessions = [make_session(context, trees=trees, session_id=i) for i in (0, 1)]
    for session in sessions:
        graft(session, make_draft(len(context), 0, [99], [-1]), 0.0)
    of_choice = node_choice._in_order_of_choice

    def raising(some: Sequence[Session], *found: Any) -> Any:
        if sessions[0] in some:
            raise KeyError(5)
        return of_choice(some, *found)

    monkeypatch.setattr(node_choice, "_in_order_of_choice", raising)
    (batch,) = SuffixDecoder().collect(sessions, Budget(StepCurve([1, 8], [1.0, 1.0]), 0.01), lambda: 0.0)
    assert batch.sessions == [sessions[1]]


class BrokenSource(DraftSource):
    """A source with one call that raises."""

    name = "broken"
    uses_scratch = True

    def __init__(self, where: str) -> None:
        def raising(*arguments: object) -> Sequence[DraftBatch]:
            raise RuntimeError(f"no {where} today")

        setattr(self, where, raising)

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        return ()


@pytest.mark.parametrize("where", ["begin", "collect", "scratch", "observe", "close"])
def test_a_source_that_raises_costs_its_drafts(where: str) -> None:
    """In any call: no session is harmed, and the source is not called again."""
    sources = (BrokenSource(where), SuffixDecoder())
    verifier = make_verifier(ToyEngine(), sources=sources, measures_drafts=False)
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])
    texts, failed = run(verifier, lambda: verifier.begin(0.0))
    verifier.handle(Close(session_id=0, epoch=1), 0.0)
    assert (texts, failed) == ({0: toy_text([1, 2, 3], LENGTH), 1: toy_text([4, 5, 6], LENGTH)}, {})
    assert [source.name for source in verifier.sources.sources] == ["remote", "suffix"]


# --- faults without a guilty session
# ---------------------------------------------------------------------------------------------


def test_an_engine_that_is_lost_ends_the_process() -> None:
    """A device in error is not tried again, and no session is blamed."""
    engine = Broken()
    engine.error = EngineLostError("CUDA error")
    verifier = make_verifier(engine)
    open_all(verifier, [[1, 2, MAGIC], [1, 2, 3]])
    with pytest.raises(EngineLostError, match="CUDA error"):
        verifier.step(lambda: 0.0)
    assert engine.num_rows == []


def test_an_engine_that_fails_with_everything_ends_the_process() -> None:
    """It is tried with a session of the verifier's own before the blame is laid on others."""

    class Dead(ToyEngine):
        def step(self, steps: Steps, tap: Tap = NO_TAP) -> StepOutput:
            raise RuntimeError("out of order")

    verifier = make_verifier(Dead())
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(EngineLostError, match="fails with every session: RuntimeError"):
        verifier.step(lambda: 0.0)


def test_halves_leave_out_only_what_raises() -> None:
    """Each is done exactly once but for those at fault, in order, for every pattern of faults among six."""
    sessions = [draft_for(i, [1]) for i in range(6)]
    for pattern in range(2**6):
        faults, bad = Faults(), {i for i in range(6) if pattern >> i & 1}

        def act(some: Sequence[Draft], bad: set[int] = bad) -> list[int]:
            if bad.intersection(one.session_id for one in some):
                raise EngineError("no")
            return [one.session_id for one in some]

        done = [i for _, ids in in_halves(sessions, act, faults, "done") for i in ids]
        assert (done, set(faults.found)) == ([i for i in range(6) if i not in bad], bad)


def test_a_device_error_is_distinguished_from_a_session_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier checks the device after any error. If the check fails, it raises EngineLostError. A CPU is not
    checked."""

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    check_alive(torch.device("cpu"))
    with pytest.raises(
        EngineLostError, match=r"the device cuda:0 failed, .*: CUDA error: device-side assert triggered$"
    ):
        check_alive(torch.device("cuda:0"))
