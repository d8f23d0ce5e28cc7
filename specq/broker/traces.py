"""The traces of the last jobs, for `specq trace`.

    traces.begin(job)              each new job: the broker notes what passes through it, which costs next to nothing
    job.trace.note("opened", ...)  something that happens a few times in a job's life
    job.trace.add_often(...)       something that happens in each round
    traces.take(identity, message) the events of another process

A job is traced in all processes if it asks for it (`Submit.trace`), or if fewer than `at_once` jobs are that did not
ask: so a few are at any time, and what that costs does not grow with the load.

Rules: events are taken only from the workers that had the job and from its client; they are numbers, and are shown as
these. A trace keeps neither its job nor that job's text.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from specq.broker.jobs.job import BrokerJob
from specq.broker.jobs.trace import JobTrace
from specq.protocol import TraceEvents

MOST_TRACES = 256


@dataclass(slots=True)
class TracedJob:
    """A job that is traced: what is shown of it, and its trace; the job itself as long as others keep it."""

    job_id: int
    owner: str
    label: str
    model: str
    submitted: float
    trace: JobTrace
    job: weakref.ref[BrokerJob]
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

    def begin(self, job: BrokerJob, now: float, event: str = "submitted") -> None:
        """Begin to trace a new job, or one that a broker before this one had taken."""
        request = job.request
        was_asked = request.submit.trace
        is_sampled = not was_asked and len(self._sampled) < self._at_once
        if is_sampled:
            self._sampled.add(job.job_id)
        job.trace = JobTrace(in_all_processes=was_asked or is_sampled)
        job.trace.note(event, now, prompt_tokens=request.prompt_len, tokens=job.transcript.num_tokens)
        shown = (job.job_id, request.owner, request.submit.label, request.model, request.submitted)
        self._jobs[job.job_id] = TracedJob(*shown, job.trace, weakref.ref(job))
        while len(self._jobs) > MOST_TRACES:
            _, oldest = self._jobs.popitem(last=False)
            if (untraced := oldest.job()) is not None:
                untraced.trace = None

    def end(self, job: BrokerJob, now: float) -> None:
        """Note that a job has ended."""
        self._sampled.discard(job.job_id)
        if (traced := self._jobs.get(job.job_id)) is not None:
            traced.finish = job.transcript.finish
        if job.trace is not None:
            reason = job.transcript.failure.reason if job.transcript.failure else ""
            job.trace.note(
                "finished", now, finish=job.transcript.finish, tokens=job.transcript.num_tokens, reason=reason[:300]
            )

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
