"""The states of a session: the table, and what must hold of a verifier between two calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specq.protocol import Close, Open, SamplingParams
from specq.testing.late import LateEngine
from specq.testing.toy import toy_info
from specq.verifier import StepCurve, Verifier
from specq.verifier.sessions.session import TRANSITIONS, SessionEvent, SessionState, after
from specq.verifier.validation import validate


def test_every_state_is_reached_and_every_session_can_be_closed():
    found = {SessionState.WAITING}
    for _ in SessionState:
        found |= {following for state in found for following in TRANSITIONS[state].values()}
    assert found == set(SessionState) == set(TRANSITIONS)
    for state in set(SessionState) - {SessionState.CLOSED}:
        assert after(state, SessionEvent.CLOSED) is SessionState.CLOSED


def test_every_event_happens_and_others_are_bugs():
    """An event that the table does not have raises."""
    assert {event for ways in TRANSITIONS.values() for event in ways} == set(SessionEvent)
    for state, ways in TRANSITIONS.items():
        for event in set(SessionEvent) - set(ways):
            with pytest.raises(AssertionError, match=f"a session that is {state} cannot be {event}"):
                after(state, event)


@pytest.fixture
def verifier() -> Verifier:
    """One whose engine has room for one of two sessions, with a step in flight."""
    made = Verifier(LateEngine(toy_info(kv_slots=30)), StepCurve([1, 64], [0.005, 0.01]), incarnation=1)
    for session_id in (7, 8):
        prompt = np.arange(20, dtype=np.int32)
        params = SamplingParams(seed=session_id)
        made.handle(
            Open(session_id=session_id, epoch=1, prompt_len=20, tokens_left=8, params=params, token_ids=prompt), 0.0
        )
    made.step(lambda: 0.0)
    return made


def test_a_session_waits_runs_and_ends(verifier):
    """The second one has no room beside the first."""
    seen = []
    while verifier.has_work:
        seen.append(tuple(session.state for session in verifier.sessions.values()))
        verifier.step(lambda: 0.0)
        validate(verifier)
    assert {state for states in seen for state in states} >= {SessionState.WAITING, SessionState.RUNNING}
    assert {session.state for session in verifier.sessions.values()} <= {SessionState.ENDED, SessionState.FREED}
    session = verifier.sessions[7]
    verifier.handle(Close(session_id=7, epoch=1), 0.0)
    assert session.state is SessionState.CLOSED


def _ends_in_the_arrays(verifier: Verifier) -> None:
    verifier.trees.has_ended[verifier.sessions[7].place] = 1


def _ends_without_an_event(verifier: Verifier) -> None:
    verifier.sessions[7].finish = "stop"


def _is_evicted_in_the_arrays(verifier: Verifier) -> None:
    verifier.trees.is_open[verifier.sessions[7].place] = 0


def _keeps_its_kv(verifier: Verifier) -> None:
    verifier.sessions[8].kv_len = 3


def _has_kv_of_what_is_not_known(verifier: Verifier) -> None:
    verifier.sessions[7].kv_len = 22


def _is_closed_and_kept(verifier: Verifier) -> None:
    verifier.sessions[8].note(SessionEvent.CLOSED)


def _is_ahead_of_itself(verifier: Verifier) -> None:
    verifier.sessions[7].journaled = 30


def _loses_its_step(verifier: Verifier) -> None:
    verifier.sessions.has_flight = False


def _swaps_places(verifier: Verifier) -> None:
    verifier.sessions[7].place = verifier.sessions[8].place


def _loses_a_token(verifier: Verifier) -> None:
    verifier.sessions[7].token_ids.pop()


@pytest.mark.parametrize(
    "spoil",
    [
        _ends_in_the_arrays,
        _ends_without_an_event,
        _is_evicted_in_the_arrays,
        _keeps_its_kv,
        _has_kv_of_what_is_not_known,
        _is_closed_and_kept,
        _is_ahead_of_itself,
        _loses_its_step,
        _swaps_places,
        _loses_a_token,
    ],
)
def test_what_does_not_fit_together_is_found(verifier: Verifier, spoil: Callable[[Verifier], None]) -> None:
    validate(verifier)
    spoil(verifier)
    with pytest.raises(AssertionError):
        validate(verifier)
