"""What a worker's heartbeat says of its sessions, against what the broker expects: a pure function, for verifiers and
drafters.

    reconcile(expected, reported) -> actions

Values in, actions out: who sends what because of them is in `specq.broker.workers.heartbeats` (verifiers) and
`specq.broker.workers.assignment` (drafters). Sessions are compared by id and epoch, and by two lengths: the committed
length now, and that at the worker's last heartbeat (`HeartbeatMark`), since what was sent after that may merely be on
its way.

    close    the worker has a session that is not its own, or is of another epoch
    keep     it has what it should have
    ahead    it has tokens that the broker lacks, and did not receive since the last heartbeat: they were lost on the
             way here
    behind   it lacks tokens that the broker had at the last heartbeat: they were lost on the way there
    missing  it lacks a session, for the first time: that may be on its way
    lost     it lacks a session again
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from specq.broker.jobs.session import HeartbeatMark

Kind = Literal["close", "keep", "ahead", "behind", "missing", "lost"]


class Expected(NamedTuple):
    """A session as the broker has it: its committed length, and what the worker's last heartbeat said of it."""

    epoch: int
    length: int
    mark: HeartbeatMark


class Reported(NamedTuple):
    """A session as a heartbeat lists it."""

    epoch: int
    length: int


class Action(NamedTuple):
    """What to do about a session; `length`: as it was reported, -1 if it was not."""

    kind: Kind
    session_id: int
    epoch: int
    length: int = -1


def reconcile(expected: Mapping[int, Expected], reported: Mapping[int, Reported]) -> list[Action]:
    """Return an action for each session of a worker, by id: first the reported ones, then those that it lacks."""
    actions = [
        Action(_kind(expected.get(session_id), found), session_id, found.epoch, found.length)
        for session_id, found in reported.items()
    ]
    for session_id in expected.keys() - reported.keys():
        wanted = expected[session_id]
        actions.append(Action("lost" if wanted.mark.is_missing else "missing", session_id, wanted.epoch))
    return actions


def _kind(expected: Expected | None, reported: Reported) -> Kind:
    """Return what to do about a session that was reported."""
    if expected is None or expected.epoch != reported.epoch:
        return "close"
    if expected.mark.length == expected.length < reported.length:
        return "ahead"
    return "behind" if reported.length < expected.mark.length else "keep"
