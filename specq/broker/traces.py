"""The traces of the last jobs, for `specq trace`.

    traces.begin(job)              each new job: the broker notes what passes through it, which costs next to nothing
    job.trace.note("opened", ...)  something that happens a few times in a job's life
    job.trace.add_often(...)       something that happens in each round
    traces.take(identity, message) the events of another process

A job is traced in all processes if it asks for it (`Submit.trace`), or if fewer than `at_once` jobs are that did not ask: so a few
are at any time, and what that costs does not grow with the load.

Rule: events are taken only from the workers that had the job and from its client; they are numbers, and are shown as these.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from specq.broker.jobs.job import Job
from specq.broker.jobs.trace import JobTrace
from specq.protocol import TraceEvents

MOST_TRACES = 256


class Traces:
    """The traces of the last jobs. `at_once`: how many jobs that did not ask are traced in all processes at a time."""

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._sampled: set[int] = set()  # of the jobs that run, those that did not ask

    def begin(self, job: Job, now: float, event: str = "submitted") -> None:
        """Begin to trace a new job, or one that a broker before this one had taken."""
        was_asked = job.request.submit.trace
        is_sampled = not was_asked and len(self._sampled) < self._at_once
        if is_sampled:
            self._sampled.add(job.job_id)
        job.trace = JobTrace(in_all_processes=was_asked or is_sampled)
        job.trace.note(event, now, prompt_tokens=job.request.prompt_len, tokens=job.transcript.num_tokens)
        self._jobs[job.job_id] = job
        while len(self._jobs) > MOST_TRACES:
            _, oldest = self._jobs.popitem(last=False)
            oldest.trace = None

    def end(self, job: Job, now: float) -> None:
        """Note that a job has ended."""
        self._sampled.discard(job.job_id)
        if job.trace is not None:
            reason = job.transcript.failure.reason if job.transcript.failure else ""
            job.trace.note(
                "finished", now, finish=job.transcript.finish, tokens=job.transcript.num_tokens, reason=reason[:300]
            )

    def find(self, job_id: int) -> Job | None:
        """Return a job that is traced."""
        return self._jobs.get(job_id)

    def newest_first(self) -> list[Job]:
        """Return the jobs that are traced."""
        return list(reversed(self._jobs.values()))

    def take(self, identity: bytes, message: TraceEvents) -> bool:
        """Take in the events of another process; False if it has none to say of such a job."""
        job = self._jobs.get(message.job_id)
        part = job.trace.parts.get(identity) if job is not None and job.trace is not None else None
        if part is not None:
            part.take(message)
        return part is not None


def trace_report(job: Job, trace: JobTrace) -> dict[str, Any]:
    """Return what is known of a job as JSON-able values."""
    request = job.request
    return {
        "job": job.job_id,
        "label": request.submit.label,
        "model": request.model,
        "finish": job.transcript.finish,
        "submitted": request.submitted,
        "in_all_processes": trace.in_all_processes,
        "dropped": max(0, trace.num_rounds - len(trace.rounds)),
        "processes": [part.to_dict() for part in trace.parts.values() if part.role != "client" or part.has_events],
        "events": trace.events(),
    }
