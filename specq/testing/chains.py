"""One session at a chain drafter, which takes many at once."""

from __future__ import annotations

import numpy as np

from specq.drafting import ChainDrafter
from specq.protocol import Int32Array


def commit_one(chains: ChainDrafter, session_id: int, token_ids: Int32Array) -> int:
    """Append committed tokens to a session. Return how many of the tokens its last chain had predicted."""
    return int(chains.commit([session_id], np.array([len(token_ids)]), token_ids)[0])
