"""Graft drafts onto the trees of sessions: one batch of arrays, aligned with the transcripts.

Rules: drafts are hints. A well-formed draft never raises; the verifier refuses other drafts when they arrive. A draft
is aligned by content (`specq.verifier.trees.reference_graft`). It may start at a position that has been passed. Then
the part that agrees with the transcript survives. It may name parents that never arrived (orphans) or that were cut
(stale). It may arrive twice. All of this is allowed.

Which sampled nodes are dropped must never depend on their tokens (decision 0008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specq.protocol import Draft, DraftDistribution, Drafts, Float64Array, Int32Array, Int64Array
from specq.verification import DeviceTokens
from specq.verifier.sessions.session import Session
from specq.verifier.trees import NEXT_IDS, Grafted

LEAST_SCORE = -1e9  # score of a node whose distribution had no probability left
CHAIN: Int32Array = np.arange(-1, 1024, dtype=np.int32)  # the parents of a chain's nodes, as places in the chain


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Drafts for some sessions: d drafts with n nodes, in order, parents before children.

    sessions, lanes, base_lens, first_ids  [d], or one number for all drafts: as in `Draft`.
    sizes         [d], or one number for all drafts: the number of nodes. With NEXT_IDS as first id, parents are places
                  in the draft.
    token_ids, parent_ids  i32[n].
    scores        f[n]: log-probabilities given the parent.
    is_whole      [d]: whether the draft is dropped as a whole if a part does not fit. This is required for a draft with
                  distributions.
    is_measured   whether the scores of point masses are already measured, over all sessions.
    rows          i32[n]: the row in `distributions` from which a node was drawn. -1, or None for all: a point mass.
    drafted       the tokens behind the handles, if `token_ids` has handles; these sessions have no other nodes.
    """

    sessions: Sequence[Session]
    lanes: npt.ArrayLike
    base_lens: npt.ArrayLike
    first_ids: npt.ArrayLike
    sizes: npt.ArrayLike
    token_ids: Int32Array
    parent_ids: Int32Array
    scores: npt.NDArray[np.floating]
    is_whole: npt.ArrayLike = False
    is_measured: bool = False
    rows: Int32Array | None = None
    distributions: Sequence[DraftDistribution] = ()
    drafted: DeviceTokens | None = None


def graft_batch(batch: DraftBatch, now: float) -> Grafted:
    """Attach the nodes that agree with the transcripts, in this order, in one call.

    All drafts are well-formed, and all sessions are in the same draft trees. Drafts for closed sessions have no effect.
    """
    return batch.sessions[0].trees.graft(
        [session.place for session in batch.sessions],
        batch.lanes,
        batch.base_lens,
        batch.first_ids,
        batch.sizes,
        batch.token_ids,
        batch.parent_ids,
        batch.scores,
        arrived=now,
        is_whole=batch.is_whole,
        is_measured=batch.is_measured,
        rows=batch.rows,
        distributions=batch.distributions,
    )


def batch_of(arrived: Sequence[tuple[Session, Draft]], *, is_measured: bool = False) -> DraftBatch:
    """Return at least one well-formed draft as a batch.

    Drafts with distributions are dropped as a whole if they do not fit.
    """
    drafts = [draft for _, draft in arrived]
    drawn = _drawn(arrived)
    return DraftBatch(
        sessions=[session for session, _ in arrived],
        lanes=[draft.lane for draft in drafts],
        base_lens=[draft.base_len for draft in drafts],
        first_ids=[draft.first_id for draft in drafts],
        sizes=[len(draft.token_ids) for draft in drafts],
        token_ids=_joined([draft.token_ids for draft in drafts]),
        parent_ids=_joined([draft.parent_ids for draft in drafts]),
        scores=_joined([draft.scores for draft in drafts]) if drawn is None else drawn.scores,
        is_whole=[bool(draft.q_size) for draft in drafts],
        is_measured=is_measured,
        rows=None if drawn is None else drawn.rows,
        distributions=() if drawn is None else drawn.distributions,
    )


def batch_of_drafts(sessions: Sequence[Session], drafts: Drafts) -> DraftBatch:
    """Return well-formed drafts of several sessions as a batch."""
    fields = drafts.lanes, drafts.base_lens, drafts.first_ids, drafts.num_nodes
    return DraftBatch(sessions, *fields, drafts.token_ids, drafts.parent_ids, drafts.scores)


def batch_of_chains(
    sessions: Sequence[Session],
    lane: int,
    token_ids: Int32Array,
    counts: Int64Array,
    scores: npt.NDArray[np.floating],
    *,
    is_measured: bool,
) -> DraftBatch:
    """Return a batch with one chain of point masses for each session.

    token_ids  i32[sessions, depth]; the first counts[i] belong to session i.
    scores     f[sessions, depth].
    """
    is_there = np.arange(token_ids.shape[1]) < counts[:, None]  # [sessions, depth]
    parents = np.broadcast_to(CHAIN[: token_ids.shape[1]], token_ids.shape)
    base_lens = [session.length for session in sessions]
    nodes = token_ids[is_there], parents[is_there], scores[is_there]
    return DraftBatch(sessions, lane, base_lens, NEXT_IDS, counts, *nodes, is_measured=is_measured)


# --- data of a draft's nodes
# ----------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """The data of the nodes of some drafts, at least one with distributions.

    Scores f64[n], and rows i32[n]: the row of a node's distribution, -1 for a point mass.
    """

    scores: Float64Array
    rows: Int32Array
    distributions: list[DraftDistribution]


def _drawn(arrived: Sequence[tuple[Session, Draft]]) -> Drawn | None:
    """Return the data of the drafts' nodes.

    Returns None if no draft with distributions is for a session that accepts them.
    """
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
    """Return f64[n]: the predicted log-probability of each node's acceptance, given its parent.

    The draft is well-formed.

    For a point mass this is the drafter's score. For a sampled node it is the probability that a second draw gives the
    same token. The tokens of earlier siblings are excluded from this draw. An honest drafter starts from the same
    value. The value here cannot depend on the node's own token.
    """
    scores = draft.scores.astype(np.float64)
    if not draft.q_size:
        return scores
    ids = draft.q_ids.reshape(-1, draft.q_size)  # [num_groups, q_size]
    weights = draft.q_weights.reshape(-1, draft.q_size).astype(np.float64)  # [num_groups, q_size]
    sampled = np.flatnonzero(draft.q_rows >= 0)
    rows = draft.q_rows[sampled]
    own = np.where(ids[rows] == draft.token_ids[sampled, None], weights[rows], 0.0).max(1)  # [num_sampled]
    left, left_squared = weights.sum(1).tolist(), (weights**2).sum(1).tolist()  # of each group, without drawn tokens
    drawn = set[tuple[int, int]]()
    nodes = zip(sampled.tolist(), rows.tolist(), draft.token_ids[sampled].tolist(), own.tolist(), strict=True)
    for node, row, token, weight in nodes:
        scores[node] = math.log(left_squared[row]) - 2 * math.log(left[row]) if left[row] > 0 else LEAST_SCORE
        if (row, token) not in drawn:
            drawn.add((row, token))
            left[row] -= weight
            left_squared[row] -= weight * weight
    return scores
