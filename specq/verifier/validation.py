"""The conditions of a verifier's sessions and steps between calls; for tests and chaos runs."""

from __future__ import annotations

from collections.abc import Iterator

from specq.verifier.core import Verifier
from specq.verifier.sessions.session import HAVE_ENDED, IN_ENGINE, Session, SessionState


def validate(verifier: Verifier) -> None:
    """Raise AssertionError with all violated conditions."""
    found = [*_flights(verifier)]
    for session in verifier.sessions.values():
        found += _state(session)
        found += _counts(session, len(verifier.in_flight))
    assert not found, "; ".join(found)


def _flights(verifier: Verifier) -> Iterator[str]:
    sessions, num_steps = verifier.sessions, len(verifier.in_flight)
    if num_steps > verifier.in_flight.most:
        yield f"{num_steps} steps are in flight"
    if sessions.has_flight != bool(num_steps):
        yield f"{num_steps} steps are in flight, and the sessions know of one: {sessions.has_flight}"
    places = {session.place for session in sessions.values()}
    if len(places) < len(sessions):
        yield f"{len(sessions)} sessions have {len(places)} places"


def _state(session: Session) -> Iterator[str]:
    """Yield where the arrays of a session differ from its state."""
    name, trees, place = f"session {session.session_id}", session.trees, session.place
    if session.state is SessionState.CLOSED:
        yield f"{name} is closed, and among the others"
        return
    if bool(trees.is_open[place]) != (session.state in IN_ENGINE):
        yield f"{name} is {session.state}, and in the engine: {bool(trees.is_open[place])}"
    if bool(trees.has_ended[place]) != (session.state in HAVE_ENDED):
        yield f"{name} is {session.state}, and has ended: {bool(trees.has_ended[place])}"
    if bool(session.finish) != (session.state in HAVE_ENDED):
        yield f"{name} is {session.state}, and its finish reason {session.finish!r}"


def _counts(session: Session, num_steps: int) -> Iterator[str]:
    """Yield where a session's counts do not fit the steps in flight.

    Each step in flight gives a session at least one token. The next step computes its KV.
    """
    name, kv_len = f"session {session.session_id}", session.kv_len
    if session.state not in IN_ENGINE and kv_len:
        yield f"{name} is {session.state}, and {kv_len} of its tokens have KV"
    if session.state is SessionState.RUNNING and not kv_len < session.length + num_steps:
        yield f"{name} has {session.length} tokens, KV of {kv_len}, and {num_steps} steps in flight"
    if not session.journaled <= session.length <= session.limit:
        yield f"{name} has {session.length} tokens of {session.limit}, and the journal {session.journaled}"
    if session.trees.length[session.place] != session.length:
        yield f"{name} has {session.length} tokens, and its tree {session.trees.length[session.place]}"
    if session.session_id != session.trees.session_id[session.place]:
        yield f"{name} stands at the place of session {session.trees.session_id[session.place]}"
