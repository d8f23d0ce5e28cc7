"""What `specq status` and `specq top` show, and the gateway's metrics are made of: the broker's state as JSON-able
values.

Rules: counters only grow while the broker runs; who wants rates takes two reports and their `time_s`. However many
workers and sessions there are, a report stays far below the size of a frame: sessions are the busiest that were asked
for, the text of each is cut. A job is shown only to those who may know of it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Any

from specq.broker.jobs.job import BrokerJob
from specq.broker.state import BrokerState
from specq.broker.workers.registry import Worker
from specq.protocol import CAPABILITIES

MOST_METRICS = 128  # workers whose metrics are shown: a report has room for so many
MOST_SESSIONS = 1000
MOST_SHOWN = 60  # characters of a label, name or tenant in the list of sessions


def status_report(state: BrokerState, asker: bytes = b"", num_sessions: int = 0) -> dict[str, Any]:
    """Return models, workers, jobs and counters; times in seconds. Of the sessions: the `num_sessions` busiest that the
    asker may know of.

    Of more than MOST_METRICS workers, the first verifiers have `metrics`, then the first drafters.
    """
    now, workers = state.clock.now, state.workers.all()
    shown = {worker.identity for worker in [*state.workers.verifiers(), *state.workers.drafters()][:MOST_METRICS]}
    num_running = sum(bool(job.session.verifier) for job in state.jobs.active.values())
    report = {
        "time_s": round(now, 6),
        "capabilities": list(CAPABILITIES),
        "models": state.workers.served_models(),
        "workers": [_worker(worker, now, worker.identity in shown) for worker in workers],
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
    """Return how many jobs of each model wait, and how many run."""
    counts = Counter((job.request.model, bool(job.session.verifier)) for job in jobs)
    return {model: {"waiting": counts[model, False], "running": counts[model, True]} for model, _ in counts}


def _worker(worker: Worker, now: float, has_metrics: bool) -> dict[str, Any]:
    return {
        "name": worker.name,
        "incarnation": worker.hello.incarnation,
        "role": worker.hello.role,
        "model": worker.model.name,
        "engine": worker.model.engine,
        "tokenizer": worker.model.tokenizer_hash,
        "state": worker.state,
        "jobs": len(worker.job_ids),
        "steps": worker.steps,
        "tokens": worker.num_tokens,
        "drafts": worker.num_drafts,
        "free_slots": worker.free_slots,
        "kv_slots": worker.model.kv_slots,
        "capabilities": list(worker.hello.capabilities),
        "heard_s_ago": round(now - worker.last_seen, 3),
    } | ({"metrics": worker.metrics} if has_metrics else {})


# --- sessions ---------------------------------------------------------------------------------------------------------


def _sessions(state: BrokerState, asker: bytes, most: int) -> dict[str, Any]:
    """Return the busiest of the jobs that wait or run: those that run, by tokens a second since they were submitted."""
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
