"""The states of a session at a verifier, and which event leads from which to which.

A session waits until there is room for its context in the engine, runs there, and ends once. Where room is short it is
evicted, and waits again; one that has ended keeps its KV until the broker closes it, or until others need the room. A
session that failed is closed.

Rule: `Session.note` is the only place that changes a state; an event that the table does not have is a bug, and raises.
Whether a session takes part in the next step is no state: it follows from its counts
(`specq.verifier.sessions.open_sessions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class SessionState(StrEnum):
    """Where a session stands."""

    WAITING = "waiting"  # not in the engine: it is new, or was evicted
    RUNNING = "running"  # in the engine
    ENDED = "ended"  # it has a finish reason, and its KV
    FREED = "freed"  # it has a finish reason, and no KV
    CLOSED = "closed"  # the verifier has no more of it


class SessionEvent(StrEnum):
    """What happens to a session."""

    ADMITTED = "admitted"  # it was opened in the engine
    EVICTED = "evicted"  # it was closed in the engine to make room
    FINISHED = "finished"  # a step came to the end of its text
    CLOSED = "closed"  # by the broker, or since it failed


Ways = Mapping[SessionEvent, SessionState]

_CLOSES: Ways = {SessionEvent.CLOSED: SessionState.CLOSED}
TRANSITIONS: Mapping[SessionState, Ways] = {
    SessionState.WAITING: {SessionEvent.ADMITTED: SessionState.RUNNING, **_CLOSES},
    SessionState.RUNNING: {
        SessionEvent.EVICTED: SessionState.WAITING,
        SessionEvent.FINISHED: SessionState.ENDED,
        **_CLOSES,
    },
    SessionState.ENDED: {SessionEvent.EVICTED: SessionState.FREED, **_CLOSES},
    SessionState.FREED: _CLOSES,
    SessionState.CLOSED: {},
}
IN_ENGINE = frozenset({SessionState.RUNNING, SessionState.ENDED})
HAVE_ENDED = frozenset({SessionState.ENDED, SessionState.FREED})


def after(state: SessionState, event: SessionEvent) -> SessionState:
    """Return the state that an event leads to; AssertionError for one that cannot happen in this state."""
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"a session that is {state} cannot be {event}"
    return following
