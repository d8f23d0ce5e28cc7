"""Suffix decoding: what followed the end of a session's text where it stood before, in this text or in earlier ones of
the same owner (SuffixDecoding, arXiv 2411.04975), where that promises more than what others have drafted.

A step costs one call for all sessions to draft, and one to choose what is hung.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specq.drafting.suffix import NO_TEXT, TOO_OLD, NotReady, SuffixTree
from specq.drafting.suffix import Requests as SuffixRequests
from specq.drafting.suffix import make_texts as make_suffix_texts
from specq.drafting.suffix.shared_texts import SharedTexts
from specq.drafting.suffix.text_drafts import batches_of_texts, most_depth
from specq.protocol import SUFFIX, SUFFIX_LANE, Int32Array, IntpArray
from specq.runtime import Faults
from specq.verifier.sources import NONE, Budget, DraftBatch, DraftSource, Session, Setup

MOST_DEPTH = 16  # of a draft
MOST_NODES = 16
FAN_OUT = 3
# What is not even offered for selection: nodes with a smaller cumulative probability, before it is calibrated, than the
# first, or than the share of what is likely enough.
FLOOR, SHARE = 0.02, 0.25


class SuffixDecoder(DraftSource):
    """The texts of all sessions, and of those that have ended: so many tokens of all owners, 0: none.

    There is nothing to begin: a draft takes microseconds and waits for what others drafted.
    """

    name = SUFFIX
    takes_sync = False

    def __init__(self, shared_tokens: int = 0) -> None:
        self._texts = make_suffix_texts()  # by the places of their sessions
        self._shared = SharedTexts(shared_tokens)

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Take in a part of what has ended; nobody waits for it."""
        self._shared.grow()
        return False

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return trees for the sessions for which they pay. If drafting fails for one, it is left out from then on."""
        if not sessions:
            return ()
        places = np.array([session.place for session in sessions], np.intp)
        floor = max(FLOOR, SHARE * budget.min_accept_prob)
        while isinstance(drafts := self._texts.draft(self._requests(sessions, places, floor)), NotReady):
            for i in drafts.reasons.nonzero()[0].tolist():
                self._make_ready(sessions[i], int(drafts.reasons[i]))
        return batches_of_texts(sessions, SUFFIX_LANE, drafts, budget.min_accept_prob)

    def _requests(self, sessions: Sequence[Session], places: IntpArray, floor: float) -> SuffixRequests:
        trees = sessions[0].trees
        groups, others = self._others(sessions) if self._shared.num_owners else (None, ())
        return SuffixRequests(places, trees.length, trees.limit, trees.recent, groups, others, FAN_OUT, floor)

    def _others(self, sessions: Sequence[Session]) -> tuple[Int32Array, Sequence[Sequence[SuffixTree]]]:
        """Return which of the owners' trees each session sees, NONE: none; and these. Who comes last was served
        last."""
        owners = [session.owner if session.place in self._texts else None for session in sessions]
        found: list[Sequence[SuffixTree]] = []
        groups: dict[str | None, int] = {None: NONE}
        for owner in reversed(dict.fromkeys(reversed(owners))):
            trees = () if owner is None else self._shared.trees(owner)
            groups[owner] = len(found) if trees else NONE
            found += [trees] if trees else []
        return np.array([groups[owner] for owner in owners], np.int32), found

    def _make_ready(self, session: Session, reason: int) -> None:
        """Do what a session's text waits for; leave it alone where that cannot be."""
        is_ready = False
        with Faults().of(session, "drafted for"):
            depth = most_depth(session, MOST_DEPTH)
            if reason == NO_TEXT and depth:
                nodes = min(session.speculation.max_nodes or MOST_NODES, MOST_NODES)
                self._texts.open(session.place, nodes, depth)
                is_ready = True
            elif reason == TOO_OLD:
                self._texts.extend(session.place, session.token_ids)
                is_ready = True
        if not is_ready:
            self.refuse(session)

    def refuse(self, session: Session) -> None:
        """Draft no more for a session."""
        if session.place != NONE:
            self._texts.leave(session.place)

    def close(self, session: Session) -> None:
        """Forget a session's text, but for what later ones of its owner may repeat."""
        if session.place != NONE and self._texts.close(session.place):
            self._shared.add(session.owner, session.token_ids, session.prompt_len)


def make(setup: Setup) -> SuffixDecoder | None:
    """Return the texts of a verifier, unless it was asked for none."""
    config = setup.config
    return None if config.prompt_lookup == "none" else SuffixDecoder(config.shared_tokens)
