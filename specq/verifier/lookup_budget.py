"""How much a verifier drafts by itself, from what the text repeats, where drafters have sent nothing."""

from __future__ import annotations

import math

from specq.drafting import longest_chain
from specq.protocol import Speculation

LOOKUP_TOKENS = 8  # of a chain at most
LOOKUP_RARITY = 16  # where none seems worth it, one node is tried so rarely


def lookup_tokens(speculation: Speculation) -> int:
    """Return how long a chain the verifier may draft itself for a job; none where the job wants a shape of its own."""
    if speculation.mode != "async" or speculation.has_fixed_shape:
        return 0
    return longest_chain(speculation, LOOKUP_TOKENS)


def num_likely_enough(chance: float, min_accept_prob: float) -> int:
    """Return how many nodes of a chain are worth verifying whose nodes each have this chance, given the one before."""
    if chance < min_accept_prob:
        return 0
    return min(LOOKUP_TOKENS, int(math.log(max(min_accept_prob, 1e-3)) / math.log(min(chance, 0.999))))
