"""What `specq status` shows, and the gateway's metrics are made of: the broker's state as JSON-able values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from specq.broker.jobs.job import Job
from specq.broker.state import State
from specq.broker.workers.registry import Worker

MOST_METRICS = 128  # workers whose metrics are shown: a report has room for so many


def status_report(state: State) -> dict[str, Any]:
    """Return models, workers, jobs and counters; times in seconds.

    Of more than MOST_METRICS workers, the first verifiers have `metrics`, then the first drafters.
    """
    workers = state.workers.all()
    shown = {worker.identity for worker in [*state.workers.verifiers(), *state.workers.drafters()][:MOST_METRICS]}
    num_running = sum(bool(job.session.verifier) for job in state.jobs.active.values())
    return {
        "models": sorted({worker.model.name for worker in state.workers.verifiers()}),
        "workers": [_worker(worker, state.clock.now, worker.identity in shown) for worker in workers],
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
            "trouble": state.ledger.trouble,
        },
    }


def _loads(jobs: Iterable[Job]) -> dict[str, dict[str, int]]:
    """Return how many jobs of each model wait, and how many run."""
    counts = Counter((job.request.model, bool(job.session.verifier)) for job in jobs)
    return {model: {"waiting": counts[model, False], "running": counts[model, True]} for model, _ in counts}


def _worker(worker: Worker, now: float, has_metrics: bool) -> dict[str, Any]:
    return {
        "name": worker.name,
        "role": worker.hello.role,
        "model": worker.model.name,
        "engine": worker.model.engine,
        "tokenizer": worker.model.tokenizer_hash,
        "state": worker.state,
        "jobs": len(worker.job_ids),
        "steps": worker.steps,
        "free_slots": worker.free_slots,
        "kv_slots": worker.model.kv_slots,
        "heard_s_ago": round(now - worker.last_seen, 3),
    } | ({"metrics": worker.metrics} if has_metrics else {})
