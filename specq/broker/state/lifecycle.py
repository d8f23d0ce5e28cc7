"""The states of a job, and which event leads from which to which.

A job that was submitted waits in the queue until a verifier has room, runs there, and ends once. When its verifier is
lost, leaves, or gives it back, it waits again and goes on from its transcript elsewhere. One that a verifier held when
an earlier broker stopped is absent: it waits for that verifier to come back before anything else.

Rule: `BrokerJob.note` is the only place that changes a state; an event that the table does not have is a bug, and
raises. The diagram in docs/reference/protocol.md is drawn from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands."""

    NEW = "new"  # made, and in no table yet
    ABSENT = "absent"  # read from the journal; the verifier that held it may come back
    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # a verifier holds its session
    GIVEN_UP = "given up"  # no verifier can go on with it; it fails before the broker handles the next message
    ENDED = "ended"  # it has a finish reason
    DROPPED = "dropped"  # the journal never had it, and will not


class JobEvent(StrEnum):
    """What happens to a job."""

    QUEUED = "queued"  # it waits for a verifier: submitted, read from the journal, or taken from a verifier
    READ_PLACED = "read, placed"  # read from the journal, which says that a verifier held it
    READ_ENDED = "read, ended"  # read from the journal with its end
    OPENED = "opened"  # its session was opened at a verifier, or opened anew
    GAVE_UP = "gave up"  # too many verifiers failed at it, or died of it
    FINISHED = "finished"  # complete, stopped, cancelled, failed
    REFUSED = "refused"  # the journal cannot take it


Ways = Mapping[JobEvent, JobState]
_ENDS: Ways = {JobEvent.FINISHED: JobState.ENDED, JobEvent.REFUSED: JobState.DROPPED}
TRANSITIONS: Mapping[JobState, Ways] = {
    JobState.NEW: {
        JobEvent.QUEUED: JobState.WAITING,
        JobEvent.READ_PLACED: JobState.ABSENT,
        JobEvent.READ_ENDED: JobState.ENDED,
    },
    JobState.ABSENT: {JobEvent.QUEUED: JobState.WAITING, JobEvent.GAVE_UP: JobState.GIVEN_UP, **_ENDS},
    JobState.WAITING: {JobEvent.OPENED: JobState.RUNNING, **_ENDS},
    JobState.RUNNING: {
        JobEvent.OPENED: JobState.RUNNING,
        JobEvent.QUEUED: JobState.WAITING,
        JobEvent.GAVE_UP: JobState.GIVEN_UP,
        **_ENDS,
    },
    JobState.GIVEN_UP: {JobEvent.FINISHED: JobState.ENDED},
    JobState.ENDED: {},
    JobState.DROPPED: {},
}


def after(state: JobState, event: JobEvent) -> JobState:
    """Return the state that an event leads to; AssertionError for one that cannot happen in this state."""
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"a job that is {state} cannot be {event}"
    return following


def diagram() -> str:
    """Return the table as a diagram in Mermaid's language."""
    lines = [
        f"    {_id(state)} --> {_id(following)}: {event}"
        for state, ways in TRANSITIONS.items()
        for event, following in ways.items()
    ]
    return "\n".join(["stateDiagram-v2", *lines])


def _id(state: JobState) -> str:
    return state.value.replace(" ", "_")
