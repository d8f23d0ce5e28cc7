"""Trees of tokens from texts, as drafts: the likely nodes, if they promise more than the live nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.grammar.leads import NO_LEADS, Leads
from specq.drafting.suffix import TextDrafts
from specq.protocol import Float64Array, Int32Array, IntpArray
from specq.runtime import Faults, in_halves
from specq.verifier.sources import NEXT_IDS, DraftBatch, Session, longest_chain, promised

RARITY = 16  # if no node is likely enough, one is tried once in this many rounds
LEAD = 1.25  # a draft must promise this many times the tokens of the live nodes to be grafted beside them
NEVER = np.inf  # tokens
NO_PROMISES = np.zeros(0)


def most_depth(session: Session, most: int) -> int:
    """Return the maximum depth of a session's draft.

    It is 0 if the session takes no drafts or asks for its own shape. It is also 0 for a synchronous session, which
    waits for its drafter's answer. Any draft would count as one.
    """
    if session.waits or not session.takes_drafts or session.speculation.has_fixed_shape:
        return 0
    return longest_chain(session.speculation, most)


def batches_of_texts(
    sessions: Sequence[Session], lane: int, drafts: TextDrafts, min_accept_prob: float, leads: Leads = NO_LEADS
) -> Sequence[DraftBatch]:
    """Return the batch of grafted drafts in a lane, one draft for each session; empty if no draft is grafted.

    The batch has the likely nodes, or now and then one to learn from, where they promise more than the live nodes.
    With leads, the drafts come behind the forced tokens.
    """
    trees = sessions[0].trees
    places = np.array([session.place for session in sessions], np.intp)
    sizes, token_ids, parents, scores = trees.operations.select(
        places,
        lane,
        *drafts,
        _enough(sessions, places, drafts.sizes, leads),
        rarity=RARITY,
        least=min_accept_prob,
    )
    if not len(token_ids):
        return ()
    chosen = sizes.nonzero()[0]
    batch = DraftBatch(
        sessions=[sessions[i] for i in chosen.tolist()],
        lanes=lane,
        base_lens=trees.length[places[chosen]],
        first_ids=NEXT_IDS,
        sizes=sizes[chosen],
        token_ids=token_ids,
        parent_ids=parents,
        scores=scores,
    )
    return [*leads.batches(), leads.before(batch)] if leads else [batch]


def _enough(sessions: Sequence[Session], places: IntpArray, sizes: Int32Array, leads: Leads) -> Float64Array | float:
    """Return how many tokens each draft must promise to be grafted, [sessions] or one number for all."""
    is_rivalled = (sessions[0].trees.num_live[places] > 0) & (sizes > 0)
    if not np.count_nonzero(is_rivalled):
        return 0.0
    enough, which, faults = np.zeros(len(sessions)), is_rivalled.nonzero()[0], Faults()
    rivalled = [sessions[i] for i in which.tolist()]
    enough[which] = NEVER
    found = in_halves(rivalled, promised, faults, "drafted for")
    if faults.found:
        which = which[[session not in faults for session in rivalled]]
    tokens = np.concatenate([NO_PROMISES, *(tokens for _, tokens in found)])
    if leads:  # which the live nodes promise, too
        tokens -= [len(leads.of(sessions[i])) for i in which.tolist()]
    enough[which] = LEAD * np.maximum(tokens, 0.0)
    return enough
