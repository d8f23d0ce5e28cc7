"""Whether a broker can take one more job."""

from __future__ import annotations

from specq.broker.admission.limits import MAX_RECORDS, MAX_TOKENS
from specq.broker.jobs.ledger import Ledger
from specq.broker.state import BrokerState


def overload(state: BrokerState, bucket: str | None) -> str:
    """Return why no job in this bucket (None: of nobody in particular) can be taken now, or ""."""
    if reason := state.closing or state.ledger.trouble:
        return f"no new jobs now: {reason}"
    return _full_queue(state, bucket) or _slow_journal(state.ledger)


def _full_queue(state: BrokerState, bucket: str | None) -> str:
    num_jobs, most = len(state.jobs.active), state.settings.max_jobs
    if num_jobs >= most:
        return f"the queue is full ({most} jobs); try again when some have ended"
    if state.jobs.num_tokens >= MAX_TOKENS:
        return f"the queue is full ({MAX_TOKENS} tokens of prompts and texts); try again when some jobs have ended"
    if bucket and state.jobs.held[bucket] >= most - num_jobs:
        return f"the queue has no room for more than {state.jobs.held[bucket]} jobs of one key now; try again when some have ended"
    return ""


def _slow_journal(ledger: Ledger) -> str:
    if ledger.sequence - ledger.settled > MAX_RECORDS:
        return "the journal is behind; try again in a moment"
    return f"{ledger.full}; try again when some have ended" if ledger.full else ""
