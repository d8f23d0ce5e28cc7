"""Whether a broker can take one more job."""

from __future__ import annotations

from specq.broker.admission.limits import MAX_RECORDS, MAX_TOKENS
from specq.broker.state import State


def overload(state: State, owner: str | None) -> str:
    """Return why no job of this owner (None: of nobody in particular) can be taken now, or ""."""
    num_jobs, most = len(state.jobs.active), state.settings.max_jobs
    if num_jobs >= most:
        return f"the queue is full ({most} jobs); try again when some have ended"
    if state.jobs.num_tokens >= MAX_TOKENS:
        return f"the queue is full ({MAX_TOKENS} tokens of prompts and texts); try again when some jobs have ended"
    if owner and state.jobs.held[owner] >= most - num_jobs:
        return f"the queue has no room for more than {state.jobs.held[owner]} jobs of one key now; try again when some have ended"
    if state.ledger.sequence - state.ledger.settled > MAX_RECORDS:
        return "the journal is behind; try again in a moment"
    if state.ledger.full:
        return f"{state.ledger.full}; try again when some have ended"
    return ""
