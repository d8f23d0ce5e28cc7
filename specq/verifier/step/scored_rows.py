"""Which rows of prompts a step scores, for sessions whose jobs want the log-probabilities of their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specq.protocol import NO_SCORED, Int32Array, IntpArray, ScoredRows
from specq.verifier.sessions.session import Session

SCORED_LOGITS = 1 << 26  # most logits of prompt rows in a step: 256 MB
MAX_SCORED = 1 << 20


def limit_scored(sessions: Sequence[Session], sizes: IntpArray, room: int) -> None:
    """Limit the rows of such prompts in a step: each has logits of the whole vocabulary."""
    for i in (sizes > 1).nonzero()[0].tolist():
        if sessions[i].prompt_scores is not None:
            sizes[i] = min(sizes[i], room)
            room -= int(sizes[i])


def scored_rows(
    sessions: Sequence[Session], starts: Int32Array, sizes: IntpArray, places: Iterable[int]
) -> dict[int, ScoredRows]:
    """Return the scored rows of the sessions at some places, by place."""
    found = {}
    for i in places:
        if (scores := sessions[i].prompt_scores) is not None:
            scored = scores.wanted(start := int(starts[i]), start + int(sizes[i]))
            if scored is not NO_SCORED:
                found[i] = scored
    return found
