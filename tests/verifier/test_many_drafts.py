"""A verifier takes the drafts of several sessions as it takes single ones."""

from __future__ import annotations

import numpy as np
import pytest

from specq.protocol import Draft, Drafts, ProtocolError
from specq.testing.toy import toy_text
from specq.verifier.core import Verifier
from tests.verifier.verifiers import PROMPT, chain, make_verifier, open_session, step

IDS = 7, 8, 9


@pytest.fixture
def verifier() -> Verifier:
    """A verifier with three sessions."""
    made = make_verifier()
    for session_id in IDS:
        open_session(made, session_id)
    step(made)
    return made


def drafts(**changes: object) -> list[Draft]:
    """Return the true continuation behind the first token, for each session."""
    text = toy_text(PROMPT, 5)
    return [chain(text[1:], session_id=session_id, base_len=4, **changes) for session_id in IDS]


def committed(verifier: Verifier) -> list[int]:
    """Return the length of each session after a step."""
    step(verifier)
    return [verifier.sessions[session_id].length for session_id in IDS]


def test_all_are_grafted(verifier: Verifier) -> None:
    verifier.handle(Drafts.of(drafts()), 0.0)
    assert committed(verifier) == [9, 9, 9]
    assert verifier.sources.num_sent["remote"] == 12


def test_those_of_unknown_sessions_are_left_out(verifier: Verifier) -> None:
    """Closed ones, and those of another epoch."""
    first, _, third = drafts()
    late = drafts(epoch=5)[1]
    verifier.handle(Drafts.of([first, late, chain([1], session_id=99), third]), 0.0)
    assert committed(verifier) == [9, 5, 9]


def test_a_bad_one_is_dropped_alone(verifier: Verifier) -> None:
    first, _, third = drafts()
    with pytest.raises(ProtocolError, match="a token is outside the vocabulary"):
        verifier.handle(Drafts.of([first, chain([10**6], session_id=8, base_len=4), third]), 0.0)
    assert committed(verifier) == [9, 5, 9]


def test_those_of_another_brokers_sessions_are_refused(verifier: Verifier) -> None:
    with pytest.raises(ProtocolError, match="session of another broker"):
        verifier.handle(Drafts.of(drafts()), 0.0, "another")
    assert committed(verifier) == [5, 5, 5]


def test_single_ones_keep_their_place_between_others(verifier: Verifier) -> None:
    """The nodes of a message hang below those that came before it, by ids."""
    text = toy_text(PROMPT, 5)
    for session_id in IDS:
        verifier.handle(chain(text[1:3], session_id=session_id, base_len=4), 0.0)
    more = [
        chain(text[3:], session_id=session_id, base_len=4, first_id=2, parent_ids=np.array([1, 2], np.int32))
        for session_id in IDS
    ]
    verifier.handle(Drafts.of(more), 0.0)
    assert committed(verifier) == [9, 9, 9]


def test_there_is_room_for_so_many_nodes(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.verifier.sources.mailbox.MAX_NODES", 11)
    verifier.handle(Drafts.of(drafts()), 0.0)
    assert committed(verifier) == [5, 5, 5]
    assert verifier.sources.num_dropped == 3
