"""The broker's reports as JSON-able values: job lists, traces, clocks, and its state.

`specq jobs` reads the lists. `specq trace` reads traces and clocks. `specq status`, `specq top` and the gateway's
metrics read the state.

Rules:
- Counters only grow while the broker runs. For a rate, take two reports and their `time_s`.
- For any number of workers and sessions, a report stays far below the frame limit. It lists only the requested
  number of busiest sessions, with clipped texts.
- A job is shown only to peers that may know it.
- Waiting and running jobs are listed from memory, ended ones from the journal.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import orjson

from specq.broker.state.job import BrokerJob
from specq.broker.state.memory import BrokerState, FindFinished
from specq.broker.state.registry import Worker
from specq.broker.state.traces import MOST_TRACES, TracedJob
from specq.journal import JobSummary
from specq.protocol import (
    BROKER_CAPABILITIES,
    Clock,
    GetClock,
    GetStatus,
    GetTrace,
    JobList,
    JournalBusyError,
    ListJobs,
    Trace,
    TraceEvents,
    status_of,
    trace_events,
)

MOST_LINES = 10_000
_ENDED = {"stop": "finished", "length": "finished", "cancelled": "cancelled", "error": "failed"}
MOST_METRICS = 128  # workers whose metrics are shown: this keeps the report small
MOST_PAIRS = 64  # verifiers that are shown of a draft worker: those with most
MOST_SESSIONS = 1000
ACCEPTED_FOR = "accepted_for"
MOST_SHOWN = 60  # characters of a label, name or tenant in the list of sessions


class ListedJob(NamedTuple):
    """A job in a list. `state` is waiting, running, finished, failed or cancelled. `age_s`: since it was submitted."""

    job_id: int
    label: str
    state: str
    tokens: int
    age_s: float
    priority: int
    model: str
    owner: str


class StatusReports:
    """Handles requests about the broker and its jobs, and trace events."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._asked: set[bytes] = set()  # clients for which the journal is asked

    def get_status(self, client: bytes, message: GetStatus) -> None:
        """Answer with the broker's state."""
        self.state.outbox.send_front(client, status_of(status_report(self.state, client, message.sessions)))

    def list_jobs(self, client: bytes, message: ListJobs) -> None:
        """Answer with a list. With a journal, the answer waits for the journal's."""
        limit, skip = min(max(message.limit, 0), MOST_LINES), max(message.skip, 0)
        if self.state.ledger.has_journal:
            if client not in self._asked:  # else an answer is on its way
                self._asked.add(client)
                others = bool(self.state.brokers) and not skip
                self.state.outbox.add(FindFinished(client, limit, skip, self.state.roles.owner(client), others))
            return
        finished = [job for job in reversed(self.state.jobs.finished.values()) if self._may_see(client, job)]
        self._answer(client, skip, [summary_of(job) for job in finished[skip : skip + limit]])

    def listed(self, client: bytes, skip: int, found: list[JobSummary] | JournalBusyError) -> None:
        """Answer with a list of active jobs and ended jobs that the journal found.

        If the journal cannot be read, list only the jobs in memory.
        """
        self._asked.discard(client)
        if not self.state.roles.is_client(client):
            return
        self._answer(client, skip, [] if isinstance(found, JournalBusyError) else found)

    def _may_see(self, client: bytes, job: BrokerJob) -> bool:
        return self.state.roles.owns(client, job.request.owner)

    def _answer(self, client: bytes, skip: int, found: Iterable[JobSummary]) -> None:
        """Answer with active jobs, and found ones: those of other brokers that have not ended, and ended ones."""
        active = [] if skip else [job for job in self.state.jobs.active.values() if self._may_see(client, job)]
        lines = [self._line(summary_of(job), "running" if job.session.verifier else "waiting") for job in active]
        others = [one for one in found if one.finish or self.state.jobs.get(one.job_id) is None]
        lines += [self._line(one, _ENDED.get(one.finish, "running")) for one in others]
        data = orjson.dumps([line._asdict() for line in lines])
        self.state.outbox.send_front(client, JobList(skip=skip, data=np.frombuffer(data, np.uint8)))

    def _line(self, job: JobSummary, state: str) -> ListedJob:
        age_s = round(max(0.0, self.state.clock.journal_time - job.submitted), 1)
        return ListedJob(job.job_id, job.label, state, job.num_tokens, age_s, job.priority, job.model, job.owner)

    # --- traces and clocks -------------------------------------------------------------------------------------------

    def get_clock(self, identity: bytes, message: GetClock) -> None:
        """Answer with the time of the broker's clock."""
        clock_us = int(self.state.clock.now * 1e6)
        self.state.outbox.send_front(identity, Clock(echo_us=message.sent_us, clock_us=clock_us))

    def take_events(self, identity: bytes, message: TraceEvents) -> None:
        """Store what another process noted about a job."""
        trace_events.check(message)
        if not self.state.traces.take(identity, message):
            self.state.counts["late_traces"] += 1

    def get_trace(self, client: bytes, message: GetTrace) -> None:
        """Answer with a job's trace, or with the reason why there is none."""
        job = self._traced(client, message.job_id)
        if job is None:
            which = f"of job {message.job_id}" if message.job_id else "of any job of yours"
            reason = f"there is no trace {which}: this broker has those of the last {MOST_TRACES} jobs since it started"
            answer = Trace(job_id=message.job_id, reason=reason)
        else:
            data = np.frombuffer(orjson.dumps(job.report()), np.uint8)
            answer = Trace(job_id=message.job_id, reason="", data=data)
        self.state.outbox.send_front(client, answer)

    def _traced(self, client: bytes, job_id: int) -> TracedJob | None:
        """Return the job if the client may see it. Without an id, return the newest such job."""
        found = self.state.traces.find(job_id)
        jobs = self.state.traces.newest_first() if not job_id else [found] if found is not None else []
        return next((job for job in jobs if self.state.roles.sees(client, job.owner)), None)


def summary_of(job: BrokerJob) -> JobSummary:
    """Return the summary of a job in memory, in the same form as the journal's."""
    request, transcript = job.request, job.transcript
    return JobSummary(
        job.job_id,
        request.submit.label,
        request.model,
        request.owner,
        request.priority,
        transcript.finish,
        transcript.num_tokens,
        request.submitted,
        transcript.ended_at,
    )


def status_report(state: BrokerState, asker: bytes = b"", num_sessions: int = 0) -> dict[str, Any]:
    """Return models, workers, jobs and counters. Times are in seconds.

    It lists the `num_sessions` busiest sessions that the asker may see. At most MOST_METRICS workers have `metrics`:
    verifiers first, then drafters.
    """
    now, workers = state.clock.now, state.workers.all()
    shown = {worker.identity for worker in [*state.workers.verifiers(), *state.workers.drafters()][:MOST_METRICS]}
    num_running = sum(bool(job.session.verifier) for job in state.jobs.active.values())
    drafted = _drafted(state)
    report = {
        "time_s": round(now, 6),
        "capabilities": list(BROKER_CAPABILITIES),
        "brokers": list(state.brokers),
        "models": state.workers.served_models(),
        "workers": [
            _worker(worker, now, worker.identity in shown) | drafted.get(worker.identity, {}) for worker in workers
        ],
        "jobs": {
            "waiting": len(state.jobs.active) - num_running,
            "running": num_running,
            "finished": len(state.jobs.finished),
        },
        "loads": _loads(state.jobs.active.values()),
        "rounds": {model: rounds.to_dict() for model, rounds in state.rounds.items()},
        "counts": dict(state.counts),
        "journal": {
            "kept": state.ledger.has_journal,
            "records": state.ledger.sequence,
            "records_waiting": state.ledger.sequence - state.ledger.settled,
            "commits": state.ledger.num_groups,
            "commit_seconds": round(state.ledger.write_s, 6),
            "trouble": state.ledger.trouble or state.ledger.full,
        },
        "faults": state.faults.report(now, lambda owner: state.roles.sees(asker, owner)),
    }
    return report | {"sessions": _sessions(state, asker, num_sessions)} if num_sessions else report


def _loads(jobs: Iterable[BrokerJob]) -> dict[str, dict[str, int]]:
    """Return the number of waiting and of running jobs for each model."""
    counts = Counter((job.request.model, bool(job.session.verifier)) for job in jobs)
    return {model: {"waiting": counts[model, False], "running": counts[model, True]} for model, _ in counts}


def _worker(worker: Worker, now: float, has_metrics: bool) -> dict[str, Any]:
    return {
        "name": worker.name,
        "incarnation": worker.hello.incarnation,
        "role": worker.hello.role,
        "model": worker.model.name,
        "arithmetic": worker.model.arithmetic,
        "engine": worker.model.engine,
        "tokenizer": worker.model.tokenizer_hash,
        "state": worker.state,
        "jobs": len(worker.job_ids),
        "steps": worker.steps,
        "tokens": worker.num_tokens,
        "drafts": worker.num_drafts,
        "sent_bytes": worker.sent_bytes,
        "received_bytes": worker.received_bytes,
        "free_slots": worker.free_slots,
        "kv_slots": worker.model.kv_slots,
        "capabilities": list(worker.hello.capabilities),
        "heard_s_ago": round(now - worker.last_seen, 3),
        "registered_s_ago": round(now - worker.joined_at, 3),
    } | ({"metrics": _metrics(worker)} if has_metrics else {})


def _metrics(worker: Worker) -> dict[str, Any]:
    """Return what a worker counts, and how many of its tokens were accepted by verifier, which only the broker says."""
    found = {name: value for name, value in worker.metrics.items() if name != ACCEPTED_FOR}
    return found | ({ACCEPTED_FOR: dict(worker.accepted_for.most_common(MOST_PAIRS))} if worker.accepted_for else {})


def _drafted(state: BrokerState) -> dict[bytes, dict[str, Any]]:
    """Return the number of running jobs that each draft worker in use drafts for, by verifier."""
    shown = {worker.identity for worker in state.workers.drafters()[:MOST_METRICS]}
    counts: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
    for job in state.jobs.active.values():
        if (verifier := state.workers.get(job.session.verifier)) is not None:
            for drafter in shown.intersection(job.drafters.identities()):
                counts[drafter][verifier.name] += 1
    return {drafter: {"drafts_for": dict(found.most_common(MOST_PAIRS))} for drafter, found in counts.items()}


def _sessions(state: BrokerState, asker: bytes, most: int) -> dict[str, Any]:
    """Return the busiest active jobs: running ones first, by tokens a second since submission."""
    seen = [job for job in state.jobs.active.values() if state.roles.sees(asker, job.request.owner)]
    now = state.clock.journal_time
    busiest = heapq.nlargest(
        min(most, MOST_SESSIONS), seen, key=lambda job: (bool(job.session.verifier), _rate(job, now))
    )
    return {"num": len(seen), "busiest": [_session(state, job, now) for job in busiest]}


def _rate(job: BrokerJob, now: float) -> float:
    return job.transcript.num_tokens / max(now - job.request.submitted, 1e-3)


def _session(state: BrokerState, job: BrokerJob, now: float) -> dict[str, Any]:
    request, stats = job.request, job.stats
    verifier = state.workers.get(job.session.verifier)
    return {
        "job": job.job_id,
        "label": request.submit.label[:MOST_SHOWN],
        "bucket": request.bucket[:MOST_SHOWN],
        "state": "running" if verifier is not None else "waiting",
        "verifier": verifier.name[:MOST_SHOWN] if verifier is not None else "",
        "drafters": len(job.drafters),
        "prompt": request.prompt_len,
        "tokens": job.transcript.num_tokens,
        "max_tokens": request.params.max_tokens,
        "age_s": round(max(0.0, now - request.submitted), 3),
        "rounds": stats.rounds,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }
