"""Trees of tokens that a text gives, as drafts: kept as far as they are likely enough, and only where they promise more than what is live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specq.drafting import Calibration, longest_chain
from specq.verifier.grafting import DraftBatch
from specq.verifier.scheduler import promised
from specq.verifier.session import Session
from specq.verifier.trees import NEXT_IDS

RARITY = 16  # where no node is likely enough, one is tried once in this many rounds
LEAD = 1.25  # times the tokens that the live nodes promise: what a draft must promise to be hung beside them


class TextDraft(NamedTuple):
    """Nodes, parents before children: their tokens, the places of their parents among them (-1: the context), and their scores."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]


NOTHING = TextDraft([], [], [])
UNTRIED = Calibration()


class Selection:
    """What of one session's drafts in a lane is hung onto its tree."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self._num_declined = 0

    def of(self, session: Session, drafted: TextDraft, min_accept_prob: float) -> TextDraft:
        """Return the nodes that are likely enough, or now and then one to learn from, if they promise more than what is live."""
        if not drafted.token_ids:
            return NOTHING
        reach_probs = self._reach_probs(session, drafted, min_accept_prob)
        kept = [i for i, prob in enumerate(reach_probs) if prob >= min_accept_prob] or self._one_to_try()
        if not kept or (session.num_live and sum(reach_probs[i] for i in kept) < LEAD * promised(session)):
            return NOTHING
        places = {node: place for place, node in enumerate(kept)}
        parents = [places.get(drafted.parents[i], -1) for i in kept]
        return TextDraft([drafted.token_ids[i] for i in kept], parents, [drafted.scores[i] for i in kept])

    def _reach_probs(self, session: Session, drafted: TextDraft, least: float) -> list[float]:
        """Return how likely each node is to be accepted with all above it, by what became of earlier ones; 0 below a node that is less likely
        than the least, since no node is likelier than its parent."""
        lane = session.lane(self.lane)
        calibration = UNTRIED if lane is None else lane.calibration
        reliability, probability = calibration.reliability(), calibration.probability
        found: list[float] = []
        for parent, score in zip(drafted.parents, drafted.scores, strict=True):
            above = found[parent] if parent >= 0 else 1.0
            found.append(above * reliability * probability(score) if above >= least else 0.0)
        return found

    def _one_to_try(self) -> list[int]:
        self._num_declined = (self._num_declined + 1) % RARITY
        return [] if self._num_declined else [0]


def most_depth(session: Session, most: int) -> int:
    """Return how deep a draft may be for a session, at most; 0 where it takes none or asks for a shape of its own."""
    if session.is_sync or not session.takes_drafts or session.speculation.has_fixed_shape:
        return 0
    return longest_chain(session.speculation, most)


def batch_of_texts(found: Sequence[tuple[Session, TextDraft]], lane: int) -> DraftBatch:
    """Return drafts of nodes for some sessions as a batch."""
    drafts = [drafted for _, drafted in found]
    return DraftBatch(
        sessions=[session for session, _ in found],
        lanes=lane,
        base_lens=[session.length for session, _ in found],
        first_ids=NEXT_IDS,
        sizes=[len(drafted.token_ids) for drafted in drafts],
        token_ids=np.array([token for drafted in drafts for token in drafted.token_ids], np.int32),
        parent_ids=np.array([parent for drafted in drafts for parent in drafted.parents], np.int32),
        scores=np.array([score for drafted in drafts for score in drafted.scores], np.float32),
    )
