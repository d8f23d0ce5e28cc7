"""Prompt lookup at the verifier: what a session's text repeats, drafted where drafters have sent nothing."""

from __future__ import annotations

import math

from specq.drafting import longest_chain
from specq.proposers import NgramIndex
from specq.protocol import Open, Speculation
from specq.verification import strategy

LOOKUP_TOKENS = 8  # of a chain at most
LOOKUP_RARITY = 16  # where no node is likely enough, one is tried once in this many rounds


class PromptLookup:
    """The lookups of one session, whose transcript `token_ids` grows elsewhere. `max_tokens`: of a chain; 0: never."""

    def __init__(self, message: Open, token_ids: list[int]) -> None:
        uses_drafts = strategy(message.params.strategy).uses_drafts
        self.max_tokens = lookup_tokens(message.speculation) if uses_drafts else 0
        self._ngrams = NgramIndex(token_ids)
        self._num_declined = 0

    def chain(self, room: int) -> tuple[list[int], float]:
        """Return at most `room` tokens that followed the text's end where it occurred before, and each one's score."""
        return self._ngrams.chain(room)

    def num_to_try(self, accept_prob: float, min_accept_prob: float) -> int:
        """Return how many nodes of a chain to graft: those likely enough, or now and then one to learn from."""
        count = num_likely_enough(accept_prob, min_accept_prob)
        if count:
            return count
        self._num_declined = (self._num_declined + 1) % LOOKUP_RARITY
        return 0 if self._num_declined else 1


def lookup_tokens(speculation: Speculation) -> int:
    """Return how long a chain the verifier may look up for a job; 0 where the job asks for a shape of its own."""
    if speculation.mode != "async" or speculation.has_fixed_shape:
        return 0
    return longest_chain(speculation, LOOKUP_TOKENS)


def num_likely_enough(accept_prob: float, min_accept_prob: float) -> int:
    """Return how many nodes of a chain reach `min_accept_prob`, each accepted with this probability given the one before."""
    if accept_prob < min_accept_prob:
        return 0
    return min(LOOKUP_TOKENS, int(math.log(max(min_accept_prob, 1e-3)) / math.log(min(accept_prob, 0.999))))


def promise_of_chain(accept_prob: float, count: int) -> float:
    """Return how many tokens of a chain are expected to be accepted, each with this probability given the one before."""
    return sum(accept_prob**depth for depth in range(1, count + 1))
