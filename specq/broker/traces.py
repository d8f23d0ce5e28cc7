"""The traces of the last jobs, for `specq trace`.

    state.begin_trace(job)         each new job: the broker notes what passes through it, which costs next to nothing
    job.trace.note("opened", ...)  something that happens a few times in a job's life
    job.trace.add_often(...)       something that happens in each round
    traces.take(identity, message) the events of another process

A job is traced in all processes if it asks for it (`Submit.trace`), or if fewer than `at_once` jobs are that did not
ask: so a few are at any time, and what that costs does not grow with the load.

Rules: events are taken only from the workers that had the job and from its client; they are numbers, and are shown as
these. A trace keeps neither its job nor that job's text.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from specq.broker.jobs.trace import JobTrace
from specq.protocol import TraceEvents

MOST_TRACES = 256


@dataclass(slots=True)
class TracedJob:
    """A job that is traced: what is shown of it, and its trace."""

    job_id: int
    owner: str
    label: str
    model: str
    submitted: float
    trace: JobTrace
    finish: str = ""

    def report(self) -> dict[str, Any]:
        """Return what is known of it as JSON-able values."""
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
    """The traces of the last jobs. `at_once`: how many jobs that did not ask are traced in all processes at a time."""

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once
        self._jobs: OrderedDict[int, TracedJob] = OrderedDict()
        self._sampled: set[int] = set()  # of the jobs that run, those that did not ask

    def trace_of(self, job_id: int, *, was_asked: bool) -> JobTrace:
        """Return the trace of a new job, which asks to be traced in all processes or does not care."""
        is_sampled = not was_asked and len(self._sampled) < self._at_once
        if is_sampled:
            self._sampled.add(job_id)
        return JobTrace(in_all_processes=was_asked or is_sampled)

    def add(self, traced: TracedJob) -> list[int]:
        """Keep a trace; return the jobs whose traces are forgotten for it."""
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
        """Return a job that is traced."""
        return self._jobs.get(job_id)

    def newest_first(self) -> list[TracedJob]:
        """Return the jobs that are traced."""
        return list(reversed(self._jobs.values()))

    def take(self, identity: bytes, message: TraceEvents) -> bool:
        """Take in the events of another process; False if it has none to say of such a job."""
        traced = self._jobs.get(message.job_id)
        part = traced.trace.parts.get(identity) if traced is not None else None
        if part is not None:
            part.take(message)
        return part is not None
