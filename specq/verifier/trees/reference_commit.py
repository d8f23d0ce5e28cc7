"""A round's effect on the trees, in plain Python: the reference of kernels/trees.c.

Lanes of sampled drafts learn from the judged nodes. Other lanes learn from every node whose parent is on the committed
path, verified or not. Such a node counts as accepted if its token was committed there. So a node need not be verified
for its lane to be calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from specq.protocol import Int32Array, UInt8Array
from specq.verification import Calibration
from specq.verifier.trees.arrays import COMMITTED, COUNTS, NONE, WINDOW, Arrays
from specq.verifier.trees.reference_choice import calibration_of
from specq.verifier.trees.reference_graft import STALE, cut, remove_lane, settle, siblings_from

HITS, MISSES, ROUNDS, LEAVES, DEPTHS, MIN_ACCEPT_PROBS = (
    COUNTS.index(name) for name in ("hits", "misses", "drafted_rounds", "leaves", "depths", "min_accept_probs")
)


def count(
    trees: Arrays,
    sessions: Sequence[int],
    sizes: Sequence[int],
    nodes: Int32Array,
    is_accepted: UInt8Array,
    min_accept_prob: int,
) -> None:
    """Count rounds before their commit; `is_accepted` marks the accepted nodes among the verified ones."""
    t = trees.views
    for session, size, end in zip(sessions, sizes, accumulate(sizes), strict=True):
        t.counts[session, HITS if t.num_live[session] else MISSES] += 1
        t.counts[session, MIN_ACCEPT_PROBS] += min_accept_prob
        verified, accepted = nodes[end - size : end].tolist(), is_accepted[end - size : end].tolist()
        if verified:
            _count_tree(t, session, verified, accepted)
        if t.takes_distributions[session]:
            _learn(t, verified, accepted)


def _count_tree(t: Any, session: int, verified: list[int], accepted: list[int]) -> None:
    inner = {t.parent[node] for node in verified}
    depths = [t.position[node] - t.length[session] for node in verified]
    t.counts[session, ROUNDS] += 1
    t.counts[session, LEAVES] += sum(node not in inner for node in verified)
    t.counts[session, DEPTHS] += max(depths) + 1
    for depth, was_accepted in zip(depths, accepted, strict=True):
        t.verified_at[session, depth, 0] += 1
        t.verified_at[session, depth, 1] += was_accepted


def _learn(t: Any, verified: list[int], accepted: list[int]) -> None:
    """Learn from the judged nodes.

    Their parent was accepted, and no sibling before them was.
    """
    at = NONE
    for node, was_accepted in zip(verified, accepted, strict=True):
        if t.parent[node] != at:
            continue
        calibration_of(t, t.node_lane[node]).observe(t.score[node], bool(was_accepted))
        if t.group[node] != NONE:
            Calibration(t.sampled_trials, t.sampled_accepted).observe(t.predicted[node], bool(was_accepted))
        if was_accepted:
            at = node


def commit(
    trees: Arrays, sessions: Sequence[int], sizes: Sequence[int], token_ids: Int32Array, num_verified: Sequence[int]
) -> None:
    """Commit tokens: keep the branch that agrees with them, cut everything else."""
    t = trees.views
    for session, size, end, verified in zip(sessions, sizes, accumulate(sizes), num_verified, strict=True):
        tokens = token_ids[end - size : end].tolist()
        num_gone = _move_root(t, session, tokens)
        t.counts[session, STALE] += max(0, num_gone - verified)
        t.num_live[session] -= num_gone
        for token in tokens:
            t.recent[session, t.length[session] % WINDOW] = token
            t.length[session] += 1


def _move_root(t: Any, session: int, tokens: list[int]) -> int:
    """Follow committed tokens down a session's tree.

    Returns the number of nodes removed from the tree.
    """
    num_gone, head, lanes_learn = 0, t.first_root[session], not t.takes_distributions[session]
    for token in tokens:
        follower = NONE
        for node in siblings_from(t, head):
            if lanes_learn:
                calibration_of(t, t.node_lane[node]).observe(t.score[node], t.token[node] == token)
            if t.token[node] == token:
                follower = node
            else:
                num_gone += cut(t, node)
        head = NONE
        if follower != NONE:
            head = t.first_child[follower]
            num_gone += 1
            settle(t, follower, COMMITTED - (t.position[follower] + 1))
    t.first_root[session] = head
    for node in siblings_from(t, head):
        t.parent[node] = NONE
    return num_gone


def forget(trees: Arrays, session: int) -> None:
    """Drop all drafts of a session, and the state of its drafters."""
    t = trees.views
    for node in siblings_from(t, t.first_root[session]):
        t.num_live[session] -= cut(t, node)
    t.first_root[session] = NONE
    while t.num_lanes[session]:
        remove_lane(t, session, t.num_lanes[session] - 1)
