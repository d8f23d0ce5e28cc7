"""What `specq status` shows: the broker's state as JSON-able values."""

from __future__ import annotations

from typing import Any

from specq.broker.state import State
from specq.broker.workers.registry import Worker


def status_report(state: State) -> dict[str, Any]:
    """Return models, workers, jobs and counters; times in seconds."""
    workers = state.workers.all()
    num_running = sum(bool(job.session.verifier) for job in state.jobs.active.values())
    return {
        "models": sorted({worker.model.name for worker in state.workers.verifiers()}),
        "workers": [_worker(worker, state.clock.now) for worker in workers],
        "jobs": {
            "waiting": len(state.jobs.active) - num_running,
            "running": num_running,
            "finished": len(state.jobs.finished),
        },
        "counts": dict(state.counts),
        "journal": {
            "kept": state.ledger.has_journal,
            "records": state.ledger.sequence,
            "records_waiting": state.ledger.sequence - state.ledger.settled,
            "trouble": state.ledger.trouble,
        },
    }


def _worker(worker: Worker, now: float) -> dict[str, Any]:
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
        "heard_s_ago": round(now - worker.last_seen, 3),
    }
