"""The traces of the latest jobs, for `specq trace`: the broker's own notes, and the events of other processes.

- `state.begin_trace(job)`: for each new job. The broker notes the job's messages, at almost no cost.
- `job.trace.note("opened", ...)`: for an event that happens a few times in a job's life.
- `job.trace.add_often(...)`: for an event of each round.
- `traces.take(identity, message)`: for the events of another process.

A job is traced in all processes if it asks for it (`Submit.trace`). Up to `at_once` other jobs are also traced that
way. So a few are traced at any time. The cost does not grow with the load.

Rules: the broker accepts events only from the job's workers and client. Events are numbers and are shown as numbers.
They are stored as received, which takes a tenth of the memory of named values. For each job the first notes and the
latest events are kept. A trace holds neither its job nor the job's text.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specq.protocol import TraceEvents, trace_events

MOST_NOTES = 128  # per job, the first ones
MOST_EVENTS = 512  # per job, the latest of each process
MOST_PARTS = 16
_ROUND = ("base_len", "tokens", "verified", "accepted", "step_us", "wait_us")
MOST_TRACES = 256


class TracePart:
    """The events of one other process for a job."""

    def __init__(self, name: str, role: str) -> None:
        self.name, self.role = name, role
        self._messages: deque[TraceEvents] = deque()
        self._num_events = self._forgotten = self._num_dropped = 0
        self.error_us = 0
        self.is_lost = self.has_ended = False

    def take(self, message: TraceEvents) -> None:
        """Add the events of a message, and forget the oldest if there are too many."""
        self.error_us, self._num_dropped = message.error_us, message.dropped
        if not len(message.kinds):
            return
        self._messages.append(message)
        self._num_events += len(message.kinds)
        while self._num_events > MOST_EVENTS and len(self._messages) > 1:
            gone = len(self._messages.popleft().kinds)
            self._num_events, self._forgotten = self._num_events - gone, self._forgotten + gone
        self.has_ended = int(message.kinds[-1]) in trace_events.LAST

    @property
    def has_events(self) -> bool:
        return bool(self._messages)

    def events(self) -> list[dict[str, Any]]:
        """Return the events by name."""
        return [event for message in self._messages for event in trace_events.unpack(message)]

    def to_dict(self) -> dict[str, Any]:
        """Return a description of the process itself."""
        is_complete = self.has_ended or self.is_lost
        return {
            "name": self.name,
            "role": self.role,
            "error_us": self.error_us,
            "dropped": self._num_dropped + self._forgotten,
            "is_complete": is_complete,
            "is_lost": self.is_lost,
        }


class JobTrace:
    """The trace of one job. Times are in seconds of the broker's clock."""

    __slots__ = ("_place", "in_all_processes", "notes", "num_rounds", "parts", "rounds")

    def __init__(self, *, in_all_processes: bool) -> None:
        self.in_all_processes = in_all_processes
        self.notes: list[
            tuple[float, int, str, dict[str, Any]]
        ] = []  # time, place among the broker's notes, event, values
        self.rounds: deque[tuple[Any, ...]] = deque(maxlen=MOST_EVENTS)  # the same for frequent events
        self.num_rounds = self._place = 0
        self.parts: dict[bytes, TracePart] = {}

    def note(self, event: str, at: float, **values: Any) -> None:
        """Note an event that happens a few times in a job's life."""
        if len(self.notes) < MOST_NOTES or event == "finished":
            self._place += 1
            self.notes.append((at, self._place, event, values))

    def note_once(self, event: str, at: float) -> None:
        """Note an event unless it was noted before."""
        if all(noted != event for _, _, noted, _ in self.notes):
            self.note(event, at)

    def add_often(self, at: float, event: str, *values: int) -> None:
        """Note an event of each round. The values of a `verdict` are those of _ROUND."""
        self.num_rounds += 1
        self._place += 1
        self.rounds.append((at, self._place, event, *values))

    def expect(self, identity: bytes, name: str, role: str) -> None:
        """Let a process send events of the job."""
        if self.in_all_processes and len(self.parts) < MOST_PARTS:
            part = self.parts.setdefault(identity, TracePart(name, role))
            part.has_ended = False

    def lose(self, identity: bytes) -> None:
        """Expect no more events from a process that is gone."""
        if identity in self.parts:
            self.parts[identity].is_lost = True

    def events(self) -> list[dict[str, Any]]:
        """Return all events in order of time."""
        often = [(at, place, event, _named(event, values)) for at, place, event, *values in self.rounds]
        own = sorted([*self.notes, *often], key=lambda note: note[:2])
        found = [{"process": "broker", "at_us": int(at * 1e6), "event": event} | values for at, _, event, values in own]
        for part in self.parts.values():
            found += [{"process": part.name} | event for event in part.events()]
        return sorted(found, key=lambda event: event["at_us"])


def _named(event: str, values: Iterable[int]) -> dict[str, Any]:
    return dict(zip(_ROUND if event == "verdict" else ("tokens",), values, strict=False))


@dataclass(slots=True)
class TracedJob:
    """A traced job: its description and its trace."""

    job_id: int
    owner: str
    label: str
    model: str
    submitted: float
    trace: JobTrace
    finish: str = ""

    def report(self) -> dict[str, Any]:
        """Return the trace as JSON-able values."""
        trace = self.trace
        return {
            "job": self.job_id,
            "label": self.label,
            "model": self.model,
            "finish": self.finish,
            "submitted": self.submitted,
            "in_all_processes": trace.in_all_processes,
            "dropped": max(0, trace.num_rounds - len(trace.rounds)),
            "processes": [part.to_dict() for part in trace.parts.values() if part.role != "client" or part.has_events],
            "events": trace.events(),
        }


class Traces:
    """The traces of the latest jobs.

    `at_once`: number of jobs that are traced in all processes at a time without having asked for it.
    """

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once
        self._jobs: OrderedDict[int, TracedJob] = OrderedDict()
        self._sampled: set[int] = set()  # running jobs that did not ask for it

    def trace_of(self, job_id: int, *, was_asked: bool) -> JobTrace:
        """Return the trace of a new job. `was_asked`: the job asks for a trace in all processes."""
        is_sampled = not was_asked and len(self._sampled) < self._at_once
        if is_sampled:
            self._sampled.add(job_id)
        return JobTrace(in_all_processes=was_asked or is_sampled)

    def add(self, traced: TracedJob) -> list[int]:
        """Keep a trace, and return the jobs whose traces are forgotten for it."""
        forgotten = []
        self._jobs[traced.job_id] = traced
        while len(self._jobs) > MOST_TRACES:
            forgotten.append(self._jobs.popitem(last=False)[0])
        return forgotten

    def end(self, job_id: int, finish: str) -> None:
        """Note that a job has ended."""
        self._sampled.discard(job_id)
        if (traced := self._jobs.get(job_id)) is not None:
            traced.finish = finish

    def find(self, job_id: int) -> TracedJob | None:
        """Return a traced job, or None."""
        return self._jobs.get(job_id)

    def newest_first(self) -> list[TracedJob]:
        """Return the traced jobs, newest first."""
        return list(reversed(self._jobs.values()))

    def take(self, identity: bytes, message: TraceEvents) -> bool:
        """Store the events of another process. Return False if it may not send events of this job."""
        traced = self._jobs.get(message.job_id)
        part = traced.trace.parts.get(identity) if traced is not None else None
        if part is not None:
            part.take(message)
        return part is not None
