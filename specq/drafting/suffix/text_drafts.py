"""Trees of tokens that texts give, as drafts: kept as far as they are likely enough, and only where they promise more
than what is live."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.suffix import TextDrafts
from specq.protocol import Float64Array, Int32Array, IntpArray
from specq.runtime import Faults, in_halves
from specq.verifier.sources import NEXT_IDS, DraftBatch, Session, longest_chain, promised

RARITY = 16  # where no node is likely enough, one is tried once in this many rounds
LEAD = 1.25  # times the tokens that the live nodes promise: what a draft must promise to be hung beside them
NEVER = np.inf  # tokens
NO_PROMISES = np.zeros(0)


def most_depth(session: Session, most: int) -> int:
    """Return how deep a draft may be for a session, at most; 0 where it takes none or asks for a shape of its own; or
    where it is synchronous: such a session waits for its drafter's answer, and any draft counts as one."""
    if session.waits or not session.takes_drafts or session.speculation.has_fixed_shape:
        return 0
    return longest_chain(session.speculation, most)


def batches_of_texts(
    sessions: Sequence[Session], lane: int, drafts: TextDrafts, min_accept_prob: float
) -> Sequence[DraftBatch]:
    """Return what is hung of drafts in a lane, one for each session: none or one batch. These are the nodes that are
    likely enough, or now and then one to learn from, where they promise more than what is live."""
    trees = sessions[0].trees
    places = np.array([session.place for session in sessions], np.intp)
    sizes, token_ids, parents, scores = trees.operations.select(
        places,
        lane,
        *drafts,
        _enough(sessions, places, drafts.sizes),
        rarity=RARITY,
        least=min_accept_prob,
    )
    if not len(token_ids):
        return ()
    chosen = sizes.nonzero()[0]
    return [
        DraftBatch(
            sessions=[sessions[i] for i in chosen.tolist()],
            lanes=lane,
            base_lens=trees.length[places[chosen]],
            first_ids=NEXT_IDS,
            sizes=sizes[chosen],
            token_ids=token_ids,
            parent_ids=parents,
            scores=scores,
        )
    ]


def _enough(sessions: Sequence[Session], places: IntpArray, sizes: Int32Array) -> Float64Array | float:
    """Return how many tokens each draft must promise to be hung, [sessions] or one number for all."""
    is_rivalled = (sessions[0].trees.num_live[places] > 0) & (sizes > 0)
    if not np.count_nonzero(is_rivalled):
        return 0.0
    enough, which, faults = np.zeros(len(sessions)), is_rivalled.nonzero()[0], Faults()
    rivalled = [sessions[i] for i in which.tolist()]
    enough[which] = NEVER
    found = in_halves(rivalled, promised, faults, "drafted for")
    if faults.found:
        which = which[[session not in faults for session in rivalled]]
    enough[which] = LEAD * np.concatenate([NO_PROMISES, *(tokens for _, tokens in found)])
    return enough
