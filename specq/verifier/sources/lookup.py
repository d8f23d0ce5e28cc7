"""Prompt lookup: chains of what a session's text repeats, where they promise more than what others have drafted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specq.drafting import Calibration, longest_chain
from specq.proposers import NgramIndex
from specq.protocol import LOOKUP_LANE, Int64Array
from specq.runtime import Faults
from specq.verifier.arms import LOOKUP
from specq.verifier.grafting import DraftBatch, batch_of_chains
from specq.verifier.scheduler import promised
from specq.verifier.session import Session
from specq.verifier.sources.interface import Budget, DraftSource, Setup

LOOKUP_TOKENS = 8  # of a chain at most
LOOKUP_RARITY = 16  # where no node is likely enough, one is tried once in this many rounds
LEAD = 1.25  # times the tokens that the live nodes promise: what a looked-up chain must promise to be hung beside them


class PromptLookup(DraftSource):
    """The lookups of all sessions. There is nothing to begin, since they take microseconds and wait for what others drafted."""

    name = LOOKUP

    def __init__(self) -> None:
        self._lookups: dict[int, SessionLookup | None] = {}  # None: nothing is looked up for this session

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return a chain for each session for which one pays. If looking up fails for one, it is left out from then on."""
        found: list[tuple[Session, LookedUp]] = []
        faults = Faults()
        for session in sessions:
            with faults.of(session, "looked up for"):
                lookup = self._of(session)
                chain = lookup and lookup.chain(session, budget.min_accept_prob)
                if chain:
                    found.append((session, chain))
            if faults.found and session in faults:
                self.refuse(session)
        return [_batch(found)] if found else ()

    def _of(self, session: Session) -> SessionLookup | None:
        if session.session_id not in self._lookups:
            self._lookups[session.session_id] = SessionLookup(session) if lookup_tokens(session) else None
        return self._lookups[session.session_id]

    def refuse(self, session: Session) -> None:
        """Look up no more for a session."""
        self._lookups[session.session_id] = None

    def close(self, session: Session) -> None:
        """Forget a session's index."""
        self._lookups.pop(session.session_id, None)


class LookedUp(NamedTuple):
    """Tokens that followed the end of a text where it occurred before, and the score of each."""

    tokens: list[int]
    score: float


class SessionLookup:
    """The lookups of one session, of chains of at most `max_tokens`."""

    def __init__(self, session: Session) -> None:
        self.max_tokens = lookup_tokens(session)
        self._ngrams = NgramIndex(session.token_ids)
        self._num_declined = 0

    def chain(self, session: Session, min_accept_prob: float) -> LookedUp | None:
        """Return a chain of what the text repeats, if it promises more than what is live."""
        room = min(self.max_tokens, session.limit - session.length - 1)
        if room < 1:
            return None
        tokens, score = self._ngrams.chain(room)
        if not tokens:
            return None
        lane = session.lane(LOOKUP_LANE)
        accept_prob = (Calibration() if lane is None else lane.calibration).probability(score)
        count = min(len(tokens), self._num_to_try(accept_prob, min_accept_prob))
        if not count or (session.num_live and promise_of_chain(accept_prob, count) < LEAD * promised(session)):
            return None
        return LookedUp(tokens[:count], score)

    def _num_to_try(self, accept_prob: float, min_accept_prob: float) -> int:
        """Return how many nodes of a chain to graft: those likely enough, or now and then one to learn from."""
        count = num_likely_enough(accept_prob, min_accept_prob)
        if count:
            return count
        self._num_declined = (self._num_declined + 1) % LOOKUP_RARITY
        return 0 if self._num_declined else 1


def make(setup: Setup) -> PromptLookup | None:
    """Return the lookups of a verifier, unless it was asked for none."""
    return None if setup.config.prompt_lookup == "none" else PromptLookup()


def lookup_tokens(session: Session) -> int:
    """Return how long a chain may be looked up for a session; 0 where it takes no drafts or asks for a shape of its own."""
    if session.is_sync or not session.takes_drafts or session.speculation.has_fixed_shape:
        return 0
    return longest_chain(session.speculation, LOOKUP_TOKENS)


def num_likely_enough(accept_prob: float, min_accept_prob: float) -> int:
    """Return how many nodes of a chain reach `min_accept_prob`, each accepted with this probability given the one before."""
    if accept_prob < min_accept_prob:
        return 0
    return min(LOOKUP_TOKENS, int(math.log(max(min_accept_prob, 1e-3)) / math.log(min(accept_prob, 0.999))))


def promise_of_chain(accept_prob: float, count: int) -> float:
    """Return how many tokens of a chain are expected to be accepted, each with this probability given the one before."""
    return sum(accept_prob**depth for depth in range(1, count + 1))


def _batch(found: Sequence[tuple[Session, LookedUp]]) -> DraftBatch:
    """Return looked-up chains as drafts."""
    counts: Int64Array = np.array([len(chain.tokens) for _, chain in found], np.int64)
    token_ids = np.zeros((len(found), counts.max()), np.int32)
    scores = np.zeros(token_ids.shape, np.float16)
    for row, (_, chain) in enumerate(found):
        token_ids[row, : counts[row]], scores[row] = chain.tokens, chain.score
    sessions = [session for session, _ in found]
    return batch_of_chains(sessions, LOOKUP_LANE, token_ids, counts, scores, is_measured=False)
