"""How an answer came about, in a line."""

from __future__ import annotations

from specq.client import Result


def summary(result: Result) -> str:
    """Return one completion's rounds, accepted drafts and rate."""
    stats = result.stats
    return (
        f"{len(result.token_ids)} tokens in {stats['rounds']} rounds, {_drafts(result)}, "
        f"{stats['tokens_per_second']:.0f} tokens/s"
    )


def _drafts(result: Result) -> str:
    accepted, drafted = result.stats["accepted_tokens"], result.stats["draft_tokens"]
    if not drafted:
        return "nothing drafted"
    return f"{accepted} of {drafted} checked drafts accepted ({result.stats['acceptance_rate']:.0%})"
