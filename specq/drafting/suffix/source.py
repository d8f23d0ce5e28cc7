"""Suffix decoding as a source: draft what followed the text's suffix earlier, if that promises more than other drafts.

It searches this text and earlier ones of the same owner (SuffixDecoding, arXiv 2411.04975). A step makes one call to
draft for all sessions, and one to choose the grafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specq.drafting.grammar.leads import Leads, leads_of
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
# Nodes below these limits are not offered for selection: a minimum cumulative probability before calibration, and a
# share of the minimum that is likely enough.
FLOOR, SHARE = 0.02, 0.25


class SuffixDecoder(DraftSource):
    """The texts of all sessions, and of ended ones: `shared_tokens` tokens of all owners. 0: none.

    `begin` starts no draft. A draft takes microseconds and waits for the drafts of other sources.
    """

    name = SUFFIX
    takes_sync = False

    def __init__(self, shared_tokens: int = 0) -> None:
        self._texts = make_suffix_texts()  # by the places of their sessions
        self._shared = SharedTexts(shared_tokens)
        self._ahead: dict[int, int] = {}  # the length of texts with forced tokens, by the places of their sessions

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Add a part of the ended texts. No session waits for it."""
        self._shared.grow()
        return False

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return trees for the sessions. A session that raises an exception is left out from then on."""
        if not sessions:
            return ()
        leads = self._leads(sessions, budget)
        if self._ahead:
            sessions = [one for one in sessions if one.length + len(leads.of(one)) >= self._ahead.get(one.place, 0)]
            if not sessions:
                return ()
        places = np.array([session.place for session in sessions], np.intp)
        floor = max(FLOOR, SHARE * budget.min_accept_prob)
        while isinstance(drafts := self._texts.draft(self._requests(sessions, places, floor)), NotReady):
            for i in drafts.reasons.nonzero()[0].tolist():
                self._make_ready(sessions[i], int(drafts.reasons[i]))
        return batches_of_texts(sessions, SUFFIX_LANE, drafts, budget.min_accept_prob, leads)

    def _leads(self, sessions: Sequence[Session], budget: Budget) -> Leads:
        """Return what is forced behind the transcripts, and add it to the texts, since it is certain to come.

        A text that was extended so is not drafted for while less is known.
        """
        leads = leads_of(sessions, budget)
        for session in sessions if leads else ():
            if lead := leads.of(session):
                if session.place not in self._texts:
                    self._make_ready(session, NO_TEXT)
                if session.place in self._texts:
                    self._texts.extend(session.place, [*session.token_ids, *lead])
                    self._ahead[session.place] = session.length + len(lead)
        return leads

    def _requests(self, sessions: Sequence[Session], places: IntpArray, floor: float) -> SuffixRequests:
        trees = sessions[0].trees
        groups, others = self._others(sessions) if self._shared.num_owners else (None, ())
        return SuffixRequests(places, trees.length, trees.limit, trees.recent, groups, others, FAN_OUT, floor)

    def _others(self, sessions: Sequence[Session]) -> tuple[Int32Array, Sequence[Sequence[SuffixTree]]]:
        """Return which group of owners' trees each session uses (NONE: none), and the groups.

        The owner that comes last was served last.
        """
        owners = [session.owner if session.place in self._texts else None for session in sessions]
        found: list[Sequence[SuffixTree]] = []
        groups: dict[str | None, int] = {None: NONE}
        for owner in reversed(dict.fromkeys(reversed(owners))):
            trees = () if owner is None else self._shared.trees(owner)
            groups[owner] = len(found) if trees else NONE
            found += [trees] if trees else []
        return np.array([groups[owner] for owner in owners], np.int32), found

    def _make_ready(self, session: Session, reason: int) -> None:
        """Open or extend a session's text; refuse the session if that is impossible."""
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
        """Stop drafting for a session."""
        if session.place != NONE:
            self._texts.leave(session.place)

    def close(self, session: Session) -> None:
        """Forget a session's text, but keep it for later sessions of its owner."""
        self._ahead.pop(session.place, None)
        if session.place != NONE and self._texts.close(session.place):
            self._shared.add(session.owner, session.token_ids, session.prompt_len)


def make(setup: Setup) -> SuffixDecoder | None:
    """Return the source of a verifier, unless the configuration disables it."""
    config = setup.config
    return None if config.prompt_lookup == "none" else SuffixDecoder(config.shared_tokens)
