"""The states of a job, and the events that lead from one to another.

A submitted job waits in the queue until a verifier has space. It runs there, and ends once. If its verifier is lost,
leaves, or gives it back, the job waits again. It then continues from its transcript elsewhere. If a verifier held the
job when an earlier broker stopped, the job is absent. It then waits for that verifier to come back first.

Rule: only `BrokerJob.note` changes a state. An event that the table does not have is a bug, and raises. The diagram in
docs/reference/protocol.md is drawn from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class JobState(StrEnum):
    """The state of a job."""

    NEW = "new"  # made, not in a table yet
    ABSENT = "absent"  # read from the journal; its former verifier may come back
    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # a verifier holds its session
    GIVEN_UP = "given up"  # no verifier can continue it; it fails before the broker handles the next message
    ENDED = "ended"  # it has a finish reason
    DROPPED = "dropped"  # the journal does not hold it and will not


class JobEvent(StrEnum):
    """An event in a job's life."""

    QUEUED = "queued"  # it waits for a verifier: submitted, read from the journal, or taken from a verifier
    READ_PLACED = "read, placed"  # read from the journal, which names a verifier for it
    READ_ENDED = "read, ended"  # read from the journal, with its end
    OPENED = "opened"  # its session was opened at a verifier, or opened anew
    GAVE_UP = "gave up"  # too many verifiers failed on it or crashed
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
    """Return the state after an event.

    Raises AssertionError if the event cannot happen in this state.
    """
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"a job that is {state} cannot be {event}"
    return following


def diagram() -> str:
    """Return the table as a Mermaid diagram."""
    lines = [
        f"    {_id(state)} --> {_id(following)}: {event}"
        for state, ways in TRANSITIONS.items()
        for event, following in ways.items()
    ]
    return "\n".join(["stateDiagram-v2", *lines])


def _id(state: JobState) -> str:
    return state.value.replace(" ", "_")
