"""How drafts become nodes on the trees of sessions: checked, and aligned with the transcript.

Rules: drafts are hints. `check_and_graft` refuses a malformed draft as a whole; a well-formed one never raises. A draft is
aligned by content (`specq.verifier.trees.reference_graft`). It may speak of a position that has been passed (what the transcript
agrees with survives), of parents that never arrived (orphans) or that were cut (stale); it may arrive twice. None of that is an
error.

Which sampled nodes are dropped must never depend on their tokens (decision 0008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specq.drafting import Calibration
from specq.protocol import (
    COLOCATED_LANE,
    LOOKUP_LANE,
    Draft,
    DraftDistribution,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    ProtocolError,
    reason_against,
    stripped,
)
from specq.verifier.prompt_lookup import promise_of_chain
from specq.verifier.scheduler import promised
from specq.verifier.session import Session
from specq.verifier.trees import NEXT_IDS

LEAD = 1.25  # times the tokens that the live nodes promise: what a looked-up chain must promise to be hung beside them
LEAST_SCORE = -1e9  # of a node that nothing was left to be drawn from
CHAIN: Int32Array = np.arange(-1, 1024, dtype=np.int32)  # the parents of a chain's nodes, as places among them


def check_and_graft(session: Session, draft: Draft, now: float, *, vocab_size: int, is_trusted: bool) -> int:
    """Graft a draft from outside, without its distributions if its drafter is not trusted; return as `graft` does.

    Raises ProtocolError for a malformed one.
    """
    reason = reason_against(draft, vocab_size)
    if reason:
        raise ProtocolError(f"a draft was dropped: {reason}")
    return graft(session, draft if is_trusted else stripped(draft), now)


def graft(session: Session, draft: Draft, now: float) -> int:
    """Attach those nodes of a well-formed draft that the transcript does not contradict; return how many nodes became live.

    A draft with distributions that does not fit is dropped as a whole.
    """
    return graft_all([(session, draft)], now)[0]


def graft_all(arrived: Sequence[tuple[Session, Draft]], now: float) -> list[int]:
    """Graft well-formed drafts of several sessions, in this order, in one call; return how many nodes of each became live."""
    if not arrived:
        return []
    drafts = [draft for _, draft in arrived]
    drawn = _drawn(arrived)
    done = arrived[0][0].trees.graft(
        [session.place for session, _ in arrived],
        [draft.lane for draft in drafts],
        [draft.base_len for draft in drafts],
        [draft.first_id for draft in drafts],
        [len(draft.token_ids) for draft in drafts],
        _joined([draft.token_ids for draft in drafts]),
        _joined([draft.parent_ids for draft in drafts]),
        _joined([draft.scores for draft in drafts]) if drawn is None else drawn.scores,
        arrived=now,
        is_whole=[bool(draft.q_size) for draft in drafts],
        rows=None if drawn is None else drawn.rows,
        distributions=() if drawn is None else drawn.distributions,
    )
    num_added: list[int] = done.num_added.tolist()
    return num_added


def graft_chains(
    sessions: Sequence[Session], token_ids: Int32Array, counts: Int64Array, scores: Float32Array, now: float
) -> None:
    """Attach chains of the colocated drafter, one for each session; their scores say what was measured over all sessions.

    token_ids i32[sessions, depth], of which the first counts[i] are session i's; scores f32[sessions, depth]
    """
    if not sessions:
        return
    is_there = np.arange(token_ids.shape[1]) < counts[:, None]  # [sessions, depth]
    parents = np.broadcast_to(CHAIN[: token_ids.shape[1]], token_ids.shape)
    sessions[0].trees.graft(
        [session.place for session in sessions], COLOCATED_LANE, [session.length for session in sessions], NEXT_IDS,
        counts, token_ids[is_there], parents[is_there], scores[is_there], arrived=now, is_measured=True,
    )  # fmt: skip


def graft_lookup(session: Session, min_accept_prob: float, now: float) -> int:
    """Attach a chain of what the text repeats, if it promises more than what is live; return how many nodes became live."""
    room = min(session.lookup.max_tokens, session.limit - session.length - 1)
    if room < 1:
        return 0
    tokens, score = session.lookup.chain(room)
    if not tokens:
        return 0
    lane = session.lane(LOOKUP_LANE)
    accept_prob = (Calibration() if lane is None else lane.calibration).probability(score)
    count = session.lookup.num_to_try(accept_prob, min_accept_prob)
    if not count or (session.num_live and promise_of_chain(accept_prob, count) < LEAD * promised(session)):
        return 0
    chain: Int32Array = np.array(tokens[:count], np.int32)
    where = session.place, LOOKUP_LANE, session.length, NEXT_IDS, len(chain)
    scores = np.full(len(chain), score, np.float16)
    done = session.trees.graft(*where, chain, CHAIN[: len(chain)], scores, arrived=now)
    return int(done.num_added[0])


# --- what a draft carries for its nodes -----------------------------------------------------------------------------------


# --- what a draft carries for its nodes -----------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """What some drafts, of which one has distributions at least, say of their nodes: scores f64[n]; rows i32[n]: which of the
    distributions a node was drawn from, -1 for a point mass."""

    scores: Float64Array
    rows: Int32Array
    distributions: list[DraftDistribution]


def _drawn(arrived: Sequence[tuple[Session, Draft]]) -> Drawn | None:
    """Return what drafts say of their nodes; None if no session takes distributions that a draft for it has."""
    if not any(draft.q_size and session.takes_distributions for session, draft in arrived):
        return None
    scores, rows, distributions = list[Float64Array](), list[Int32Array](), list[DraftDistribution]()
    for session, draft in arrived:
        is_drawn = draft.q_size and session.takes_distributions
        scores.append(predicted_scores(draft) if is_drawn else draft.scores.astype(np.float64))
        own = draft.q_rows if is_drawn else np.full(len(draft.token_ids), -1, np.int32)
        rows.append(np.where(own < 0, -1, own + len(distributions)).astype(np.int32))
        distributions += distributions_of(draft) if is_drawn else []
    return Drawn(np.concatenate(scores), np.concatenate(rows), distributions)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def distributions_of(draft: Draft) -> list[DraftDistribution]:
    """Return the draft distributions of a well-formed draft."""
    rows = zip(draft.q_ids.reshape(-1, draft.q_size), draft.q_weights.reshape(-1, draft.q_size), strict=True)
    return [DraftDistribution(ids, weights) for ids, weights in rows]


def predicted_scores(draft: Draft) -> Float64Array:
    """Return f64[n]: the predicted log-probability that each node of a well-formed draft is accepted, given its parent.

    Of a point mass it is the drafter's score. Of a sampled node it is the probability that a second draw from its draft
    distribution, without the earlier siblings' tokens, gives the same token. An honest drafter starts from that value, too; but
    here it cannot depend on the node's own token.
    """
    scores = draft.scores.astype(np.float64)
    if not draft.q_size:
        return scores
    ids = draft.q_ids.reshape(-1, draft.q_size)  # [num_groups, q_size]
    weights = draft.q_weights.reshape(-1, draft.q_size).astype(np.float64)  # [num_groups, q_size]
    sampled = np.flatnonzero(draft.q_rows >= 0)
    rows = draft.q_rows[sampled]
    own = np.where(ids[rows] == draft.token_ids[sampled, None], weights[rows], 0.0).max(1)  # [num_sampled]
    left, left_squared = weights.sum(1).tolist(), (weights**2).sum(1).tolist()  # of each group, less what was drawn
    drawn = set[tuple[int, int]]()
    nodes = zip(sampled.tolist(), rows.tolist(), draft.token_ids[sampled].tolist(), own.tolist(), strict=True)
    for node, row, token, weight in nodes:
        scores[node] = math.log(left_squared[row]) - 2 * math.log(left[row]) if left[row] > 0 else LEAST_SCORE
        if (row, token) not in drawn:
            drawn.add((row, token))
            left[row] -= weight
            left_squared[row] -= weight * weight
    return scores
