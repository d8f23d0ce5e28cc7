"""Suffix decoding: what followed the end of a session's text where it stood before, in this text or in earlier ones of the same owner
(SuffixDecoding, arXiv 2411.04975), where that promises more than what others have drafted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specq.proposers import SuffixTree, draft_suffix, make_suffix_tree
from specq.protocol import SUFFIX_LANE
from specq.runtime import Faults
from specq.verifier.arms import SUFFIX
from specq.verifier.grafting import DraftBatch
from specq.verifier.session import Session
from specq.verifier.sources.interface import Budget, DraftSource, Setup
from specq.verifier.sources.shared_texts import SharedTexts
from specq.verifier.sources.text_drafts import NOTHING, Selection, TextDraft, batch_of_texts, most_depth

MOST_DEPTH = 16  # of a draft
MOST_NODES = 16
FAN_OUT = 3
# What is not even offered for selection: nodes with a smaller cumulative probability, before it is calibrated, than the first, or than the share
# of what is likely enough.
FLOOR, SHARE = 0.02, 0.25


class SuffixDecoder(DraftSource):
    """The texts of all sessions, and of those that have ended: so many tokens of all owners, 0: none.

    There is nothing to begin: a draft takes microseconds and waits for what others drafted.
    """

    name = SUFFIX

    def __init__(self, shared_tokens: int = 0) -> None:
        self._texts: dict[int, SessionText | None] = {}  # None: nothing is drafted for this session
        self._shared = SharedTexts(shared_tokens)

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Take in a part of what has ended; nobody waits for it."""
        self._shared.grow()
        return False

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return a tree for each session for which one pays. If drafting fails for one, it is left out from then on."""
        found: list[tuple[Session, TextDraft]] = []
        faults = Faults()
        for session in sessions:
            with faults.of(session, "drafted for"):
                text = self._of(session)
                drafted = text and text.draft(session, self._shared.trees(session.owner), budget.min_accept_prob)
                if drafted and drafted.token_ids:
                    found.append((session, drafted))
            if faults.found and session in faults:
                self.refuse(session)
        return [batch_of_texts(found, SUFFIX_LANE)] if found else ()

    def _of(self, session: Session) -> SessionText | None:
        if session.session_id not in self._texts:
            self._texts[session.session_id] = SessionText(session) if most_depth(session, MOST_DEPTH) else None
        return self._texts[session.session_id]

    def refuse(self, session: Session) -> None:
        """Draft no more for a session."""
        self._texts[session.session_id] = None

    def close(self, session: Session) -> None:
        """Forget a session's text, but for what later ones of its owner may repeat."""
        if self._texts.pop(session.session_id, None) is not None:
            self._shared.add(session.owner, session.token_ids, session.prompt_len)


class SessionText:
    """The text of one session, and drafts for it."""

    def __init__(self, session: Session) -> None:
        self.max_depth = most_depth(session, MOST_DEPTH)
        self.max_nodes = min(session.speculation.max_nodes or MOST_NODES, MOST_NODES)
        self._tree = make_suffix_tree()
        self._selection = Selection(SUFFIX_LANE)

    def draft(self, session: Session, others: Sequence[SuffixTree], min_accept_prob: float) -> TextDraft:
        """Return what may follow, if it promises more than what is live."""
        self._tree.extend(session.token_ids[self._tree.num_tokens :])
        room = min(self.max_depth, session.limit - session.length - 1)
        if room < 1:
            return NOTHING
        floor = max(FLOOR, SHARE * min_accept_prob)
        found = draft_suffix(
            (self._tree, *others), session.token_ids, self.max_nodes, most_depth=room, fan_out=FAN_OUT, floor=floor
        )
        drafted = TextDraft(found.token_ids, found.parents, [math.log(prob) for prob in found.probs])
        return self._selection.of(session, drafted, min_accept_prob)


def make(setup: Setup) -> SuffixDecoder | None:
    """Return the texts of a verifier, unless it was asked for none."""
    config = setup.config
    return None if config.prompt_lookup == "none" else SuffixDecoder(config.shared_tokens)
