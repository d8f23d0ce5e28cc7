"""Steps that overlap, where a session or a step is at fault, or the next plan is in vain; bursts and rooms."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specq.protocol.arrays import Int32Array
from specq.protocol.messages import Open, SessionFailed
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.late import LateEngine
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.verifier.control.choices import Step
from specq.verifier.sessions import admission as kv_admission
from specq.verifier.step import plan as planner
from tests.verifier.overlapping import PLAIN, PROMPT, apart, make_verifier, open_session, run, step
from tests.verifier.random_service import FailingLater


def test_a_step_that_fails_when_it_is_collected_is_repeated() -> None:
    """What was launched behind it is discarded; every session goes on."""
    engine = LateEngine()
    engine.failing[3] = RuntimeError("once")
    verifier = make_verifier(engine)
    for session_id in (7, 8):
        open_session(verifier, session_id)
    assert run(verifier) == {7: toy_text(PROMPT, 12), 8: toy_text(PROMPT, 12)}
    assert engine.num_discarded == 1


@pytest.mark.parametrize("owner", ["", "ann", "+digest ann"])
def test_another_owner_s_prompt_is_not_waited_for(owner: str) -> None:
    """It cannot be shared, and the wait would reveal that it is the same."""
    verifier, prompt = make_verifier(LateEngine()), np.arange(1, 41, dtype=np.int32)
    for session_id, own in ((7, "ben"), (8, owner)):
        message = Open(
            session_id=session_id, epoch=1, prompt_len=40, tokens_left=5, params=SamplingParams(), token_ids=prompt,
            speculation=PLAIN, owner=own,
        )  # fmt: skip
        verifier.handle(message, 0.0)
    step(verifier)
    assert verifier.sessions[7].is_open
    assert verifier.sessions[8].is_open


def test_sessions_wait_for_a_shared_prompt_in_flight() -> None:
    engine = LateEngine()
    verifier = make_verifier(engine)
    prompt = np.arange(1, 41, dtype=np.int32)
    for session_id in (7, 8):
        message = Open(
            session_id=session_id, epoch=1, prompt_len=40, tokens_left=5, params=SamplingParams(), token_ids=prompt,
            speculation=PLAIN,
        )  # fmt: skip
        verifier.handle(message, 0.0)
        step(verifier)
    assert not verifier.sessions[8].is_open
    step(verifier)
    assert verifier.sessions[8].is_open


class KnowingEngine(LateEngine):
    """Has KV of the first 32 tokens of all contexts."""

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        start: int = super().open(session_id, token_ids) + 32
        self.contexts[session_id] = token_ids[:start].tolist()
        return start


def test_a_prompt_that_is_in_flight_is_not_waited_for_where_it_shares_no_more() -> None:
    """What both begin with had KV before: the second opens behind the step in which the first computes its own part."""
    verifier = make_verifier(KnowingEngine())
    for session_id, own in ((7, 41), (8, 42)):
        message = Open(
            session_id=session_id, epoch=1, prompt_len=41, tokens_left=5, params=SamplingParams(),
            token_ids=np.array([*range(1, 41), own], np.int32), speculation=PLAIN,
        )  # fmt: skip
        verifier.handle(message, 0.0)
        step(verifier)
    assert verifier.sessions[8].is_open


@pytest.mark.parametrize("is_apart", [False, True])
def test_sessions_in_flight_are_not_evicted(is_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room, the step in flight ends first."""
    engine = LateEngine(toy_info(kv_slots=30))
    engine.is_apart = is_apart
    verifier = make_verifier(engine)
    evict = kv_admission._evict

    def checked(session: Any, of: Any) -> None:
        assert not engine.flights
        evict(session, of)

    monkeypatch.setattr(kv_admission, "_evict", checked)
    for session_id in (7, 8):
        open_session(verifier, session_id, 20)
    texts = run(verifier)
    assert set(map(tuple, texts.values())) == {tuple(toy_text(PROMPT, 20))}


def test_the_controller_learns_from_whole_steps() -> None:
    """A step takes from the end of the one before to its own end, however early it was launched; which it says."""
    verifier = make_verifier()
    open_session(verifier, tokens_left=30, speculation=Speculation(mode="async"))
    learned = list[Step]()
    verifier.policy.learn = learned.append  # type: ignore[method-assign]
    now = iter(range(10_000))
    ends = []
    while verifier.has_work:
        if list(verifier.step(lambda: float(next(now)))):
            ends.append(verifier.control.last_end)
    verifier.control.learn()
    assert [step.seconds for step in learned[:-1]] == [end - start for start, end in pairwise(ends[:-1])]
    assert {step.kind.is_early for step in learned} == {True}


# --- faults and bursts beside three steps
# ---------------------------------------------------------------------------------


def _planned_in_vain(session_id: int, from_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans with a session raise from some call on."""
    plan, calls = planner.plan, list[int]()

    def planned(sessions: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) >= from_call and any(session.session_id == session_id for session in sessions):
            raise ValueError("a plan")
        return plan(sessions, *arguments, **options)

    monkeypatch.setattr(planner, "plan", planned)


def test_a_session_at_fault_in_the_oldest_step_and_in_the_next_plan_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is planned before the oldest says what is wrong with it."""
    engine = FailingLater()
    engine.is_apart, engine.bad = True, set()
    verifier = make_verifier(engine)
    for session_id in (7, 8):
        open_session(verifier, session_id)
    for _ in range(4):
        step(verifier)
    assert len(engine.flights) == 2
    engine.bad.add(7)
    _planned_in_vain(7, 0, monkeypatch)
    said = step(verifier)
    assert [one.session_id for one in said if isinstance(one, SessionFailed)] == [7]
    assert 7 not in verifier.sessions


def test_a_text_that_has_ended_does_not_fail_by_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in the oldest step, when the next one was planned in vain."""
    text = toy_text(PROMPT, 30)
    verifier = make_verifier(apart())
    open_session(verifier, 7, 30, stop_token_ids=(text[4],))
    open_session(verifier, 8, 30)
    _planned_in_vain(7, 5 + 2, monkeypatch)  # when two steps behind the fourth token's are in flight
    said = [one for _ in range(12) if verifier.has_work for one in step(verifier) if one.session_id == 7]
    assert [one for one in said if isinstance(one, SessionFailed)] == []
    assert (said[-1].finish, verifier.sessions[7].token_ids) == ("stop", PROMPT + text[:5])


def test_sources_begin_after_a_burst_beside_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the host lets them begin between two steps, or the step does."""
    verifier, begun = make_verifier(apart()), list[int]()
    monkeypatch.setattr(verifier.sources, "begin", lambda *_, **__: begun.append(0))
    for session_id in range(20):
        open_session(verifier, session_id, 30)
    for number in range(1, 9):
        verifier.begin(0.0)
        step(verifier)
        assert len(begun) == number


class BlockEngine(ToyEngine):
    """KV in blocks of sixteen tokens that belong to one session each; where more sessions need another one than there
    are, nothing is free."""

    num_blocks = 9

    @property
    def free_slots(self) -> int:
        lengths = [len(context) for context in self.contexts.values()]
        free = self.num_blocks - sum(-(-length // 16) for length in lengths)
        if sum(length % 16 == 0 for length in lengths) > free:
            return 0
        return 16 * free + sum(-length % 16 for length in lengths)


def test_sessions_that_have_no_room_let_others_go_on() -> None:
    """More sessions than a step may have, all blocks in use: it is the turn of two that fit only into what others have
    left of theirs."""
    engine = BlockEngine()
    verifier = make_verifier(engine, max_sessions=2)
    for session_id in (7, 8, 9, 10, 11):
        if session_id == 10:
            for _ in range(48):
                step(verifier)
            assert {-(-len(context) // 16) for context in engine.contexts.values()} == {3}
        open_session(verifier, session_id, 40 if session_id < 10 else 3)
    texts = run(verifier)
    assert [len(verifier.sessions[i].token_ids) for i in (7, 8, 9, 10, 11)] == [43, 43, 43, 6, 6]
    assert texts[10] == texts[11] == toy_text(PROMPT, 3)
