"""How a draft becomes nodes of a session's tree: checked, aligned with the transcript, attached.

Rules: drafts are hints. A well-formed draft never raises (the verifier refuses others when they arrive). A draft is aligned by
content. It may speak of a position that has been passed (what the transcript agrees with survives), of parents that
never arrived (orphans) or that were cut (stale); it may arrive twice. None of that is an error.

Which sampled nodes are dropped must never depend on their tokens (decision 0008).
"""

from __future__ import annotations

import math

import numpy as np

from specq.protocol import Draft, DraftDistribution
from specq.verifier.draft_tree import Chain, Node
from specq.verifier.lanes import Lane, lane_of
from specq.verifier.session import Session

MAX_LIVE_NODES = 512  # of one session; nodes beyond are dropped
LEAST_SCORE = -1e9  # of a node that nothing was left to be drawn from


def hang(session: Session, draft: Draft | Chain, now: float) -> None:
    """Hang what a source drafted onto a session's tree; a chain stands alone where nothing else is live."""
    if isinstance(draft, Draft):
        graft(session, draft, now)
    else:
        session.offer(draft)


def graft(session: Session, draft: Draft, now: float) -> int:
    """Attach those nodes of a well-formed draft that the transcript does not contradict; return how many nodes became live.

    A draft with distributions that does not fit is dropped as a whole.
    """
    lane = lane_of(session.lanes, draft.lane)
    if lane is None:
        return 0
    num_nodes, num_before, seen_before = len(draft.token_ids), session.num_live, lane.seen
    session.note_draft(draft.base_len, num_nodes)
    lane.note(draft.first_id, num_nodes)
    is_too_much = draft.q_size and num_before + num_nodes > MAX_LIVE_NODES
    if is_too_much or not lane.has_room(num_nodes, session.length):
        session.stats.stale += num_nodes
        lane.first_after_loss = lane.seen + 1
        return 0
    _align(session, lane, draft, seen_before, now)
    return session.num_live - num_before


def _align(session: Session, lane: Lane, draft: Draft, seen_before: int, now: float) -> None:
    """Attach each node below its parent, note it as committed, or count it as dropped.

    `above` is where a node hangs: a live node, or a length of the transcript; None where the parent is unknown or was cut. A
    parent that is neither in this draft nor in one that arrived before makes an orphan; what else does not fit is stale.
    """
    length, token_ids, stats = session.length, session.token_ids, session.stats
    groups = Groups()
    rows = zip(draft.token_ids.tolist(), draft.parent_ids.tolist(), *_scores(session, draft), strict=True)
    for rank, (token, parent_id, score, distribution) in enumerate(rows):
        node_id = draft.first_id + rank
        if node_id in lane.node_table:
            continue
        above = draft.base_len if parent_id < 0 else lane.find(parent_id)
        if isinstance(above, Node):
            node = Node(draft.lane, node_id, token, above, above.position + 1, score, now)
            attach(session, lane, node, groups.of(session, node, distribution), rank)
        elif above == length:
            node = Node(draft.lane, node_id, token, None, length, score, now)
            attach(session, lane, node, groups.of(session, node, distribution), rank)
        elif above is not None and above < length and token_ids[above] == token:
            lane.node_table[node_id] = above + 1
        elif seen_before < parent_id < draft.first_id:
            stats.orphans += 1
        else:
            stats.stale += 1


class Groups:
    """Which sibling groups of a draft are the sampled ones of their positions.

    A position has one sampled sibling group, the first that came; what is sampled there later counts as point masses, which
    is exact whatever they are.
    """

    def __init__(self) -> None:
        self._first: dict[int, DraftDistribution] = {}  # by position, as far as this draft has asked

    def of(self, session: Session, fresh: Node, distribution: DraftDistribution | None) -> DraftDistribution | None:
        """Return what a fresh node counts as drawn from."""
        if distribution is None:
            return None
        siblings = _siblings(session, fresh)
        first = self._first.get(id(siblings))
        if first is None:
            known = (node.distribution for node in siblings.values() if node.distribution is not None)
            first = self._first[id(siblings)] = next(known, distribution)
        return distribution if first is distribution else None


def attach(session: Session, lane: Lane, fresh: Node, distribution: DraftDistribution | None, rank: int) -> None:
    """Hang a node onto the tree, or let its id stand for the sibling that has the same token already. A sampled node takes the
    place of a point mass with its token."""
    siblings = _siblings(session, fresh)
    node = siblings.get(fresh.token)
    if node is None:
        if session.num_live >= MAX_LIVE_NODES:
            return
        node = siblings[fresh.token] = fresh
        session.num_live += 1
    elif node.lane == fresh.lane:
        node.node_id = fresh.node_id  # sent again
    lane.node_table[fresh.node_id] = node
    if distribution is not None:
        node.draw(distribution, rank, fresh, session.sampled_calibration.probability(fresh.score))


def _siblings(session: Session, node: Node) -> dict[int, Node]:
    return session.roots if node.parent is None else node.parent.children


# --- what a draft carries for its nodes -----------------------------------------------------------------------------------


def _scores(session: Session, draft: Draft) -> tuple[list[float], list[DraftDistribution | None]]:
    """Return each node's score, and its draft distribution where the session takes those."""
    if not session.takes_distributions:
        return draft.scores.tolist(), [None] * len(draft.scores)
    return predicted_scores(draft), distributions_of(draft)


def distributions_of(draft: Draft) -> list[DraftDistribution | None]:
    """Return the draft distribution of each node of a well-formed draft; None for point masses."""
    size = draft.q_size
    if not size:
        return [None] * len(draft.token_ids)
    rows = zip(draft.q_ids.reshape(-1, size), draft.q_weights.reshape(-1, size), strict=True)
    distributions = [DraftDistribution(ids, weights) for ids, weights in rows]
    return [distributions[row] if row >= 0 else None for row in draft.q_rows.tolist()]


def predicted_scores(draft: Draft) -> list[float]:
    """Return the predicted log-probability that each node of a well-formed draft is accepted, given its parent.

    Of a point mass it is the drafter's score. Of a sampled node it is the probability that a second draw from its draft
    distribution, without the earlier siblings' tokens, gives the same token. An honest drafter starts from that value, too; but
    here it cannot depend on the node's own token.
    """
    scores: list[float] = draft.scores.tolist()
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
