"""The nodes that may be verified, in plain Python: the reference of kernels/choose.h.

Siblings are judged in this order: sampled ones as drawn, then point masses. A node is judged only if all nodes before
it were rejected. Its acceptance probability accounts for that. So a sampled sibling is at most as likely as the
siblings before it. A cut by probability removes the last siblings first.

`probabilistic` is exact only if a cut ignores a sampled node's own token (decision 0008). So the node's probability
comes from the draft distribution and the earlier draws. It never comes from the drafter's score. `depends_on` is the
last node whose token the scheduler must know first.

The module also selects the drafted nodes to graft: the reference of kernels/select.h.

It keeps a draft's nodes that are likely enough, with all nodes above them. The estimate uses the results of earlier
nodes of their lane. A node is at most as likely as its parent. Without such nodes, the first is tried now and then, so
that the lane learns. If the kept nodes promise less than `enough`, none is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specq.verification import Calibration
from specq.verifier.trees.arrays import FIRST_OWN_LANE, NONE, Arrays
from specq.verifier.trees.reference_graft import siblings_from

UNTRIED = Calibration()


class Likely(NamedTuple):
    """Places of nodes, and the number of accepted tokens that they promise."""

    kept: list[int]
    promise: float


def select(
    trees: Arrays,
    session: int,
    lane_id: int,
    parents: Sequence[int],
    scores: Sequence[float],
    enough: float,
    rarity: int,
    least: float,
) -> list[int]:
    """Return the places of the nodes of a session's draft to graft."""
    t, own = trees.views, (session, lane_id - FIRST_OWN_LANE)
    if not parents or session < 0 or t.length[session] == NONE:
        return []
    kept, promise = likely(trees, session, lane_id, parents, scores, least)
    if not kept:
        t.num_declined[own] = (t.num_declined[own] + 1) % rarity
        kept = [] if t.num_declined[own] else [0]
    return kept if promise >= enough else []


def likely(
    trees: Arrays, session: int, lane_id: int, parents: Sequence[int], scores: Sequence[float], least: float
) -> Likely:
    """Return the nodes that are likely enough.

    Without such nodes, the promise is that of the first node.
    """
    calibration = _calibration(trees, session, lane_id)
    reliability, reach_probs = calibration.reliability(), list[float]()
    kept, promise = list[int](), 0.0
    for i, (parent, score) in enumerate(zip(parents, scores, strict=True)):
        above = reach_probs[parent] if parent >= 0 else 1.0
        reach_probs.append(above * reliability * calibration.probability(score) if above >= least else 0.0)
        if reach_probs[i] >= least:
            kept.append(i)
            promise += reach_probs[i]
    return Likely(kept, promise if kept else reach_probs[0])


def _calibration(trees: Arrays, session: int, lane_id: int) -> Calibration:
    t = trees.views
    for k in range(t.num_lanes[session]):
        if t.lane_id[t.session_lanes[session, k]] == lane_id:
            return calibration_of(t, t.session_lanes[session, k])
    return UNTRIED


def candidates(trees: Arrays, session: int, end: int, floor: float) -> list[int]:
    """Return a session's nodes that may be verified; set `reach_prob` and `depends_on`.

    These have a cumulative acceptance probability of at least `floor` and a position before `end`.
    """
    t = trees.views
    found = offered(t, siblings_from(t, t.first_root[session]), 1.0, NONE, floor, end)
    for node in found:  # the list grows meanwhile
        above = node if t.group[node] != NONE else t.depends_on[node]
        found += offered(t, siblings_from(t, t.first_child[node]), t.reach_prob[node], above, floor, end)
    return found


def offered(t: Any, siblings: Sequence[int], reach_prob: float, above: int, floor: float, end: int) -> list[int]:
    """Weigh siblings whose parent has this `reach_prob`; return the siblings that may be verified.

    above  the node on which the first sibling depends.
    """
    nodes = weighed(t, siblings, reach_prob)
    for node in nodes:
        t.depends_on[node] = above
        above = node if t.group[node] != NONE else above
    return [node for node in nodes if t.reach_prob[node] >= floor and t.position[node] < end]


def weighed(t: Any, siblings: Sequence[int], reach_prob: float) -> list[int]:
    """Set the `reach_prob` of siblings whose parent has this one.

    Returns them in the order of judgement.
    """
    nodes = in_order(t, siblings)
    most = left = reach_prob
    for node in nodes:
        t.reach_prob[node] = left * probability(t, node)
        if t.group[node] != NONE:
            most = t.reach_prob[node] = min(most, t.reach_prob[node])
            left -= t.reach_prob[node]
    return nodes


def in_order(t: Any, siblings: Sequence[int]) -> list[int]:
    """Return siblings in the order of judgement."""
    return sorted(siblings, key=lambda node: (0, t.rank[node]) if t.group[node] != NONE else (1, 0))


def probability(t: Any, node: int) -> float:
    """Return the estimated acceptance of a node given its parent's.

    The lane's calibration corrects it, unless the score was measured elsewhere.
    """
    if t.is_measured[node] and t.group[node] == NONE:
        return Calibration().probability(t.score[node])
    return calibration_of(t, t.node_lane[node]).probability(t.score[node])


def calibration_of(t: Any, lane: int) -> Calibration:
    """Return the calibration of a lane."""
    return Calibration(memoryview(t.trials.obj[lane]), memoryview(t.accepted.obj[lane]))


def best_chain(t: Any, nodes: Sequence[int], most: int) -> list[int]:
    """Return the chain of at most `most` nodes with the most promised tokens, for engines without trees.

    Rule: the choice of a node depends neither on its token nor on the nodes below. So only the first of sampled
    siblings is eligible. A chain's promise counts down to its first sampled node.

    `nodes` are a session's candidates.
    """
    depths, sibling_groups = {NONE: 0}, dict[int, list[int]]()
    for node in nodes:
        above = t.parent[node]
        if depths.get(above, most) < most:
            depths[node] = depths[above] + 1
            sibling_groups.setdefault(above, []).append(node)
    promises = dict.fromkeys(depths, 0.0)  # expected tokens of the chain below each
    following: dict[int, int] = {}
    for above, sibling_group in reversed(sibling_groups.items()):
        eligible = sibling_group if t.group[sibling_group[0]] == NONE else sibling_group[:1]
        node = following[above] = max(eligible, key=lambda node: t.reach_prob[node] + promises[node])
        promises[above] = t.reach_prob[node] + (promises[node] if t.group[node] == NONE else 0.0)
    chain: list[int] = []
    while (end := chain[-1] if chain else NONE) in following:
        chain.append(following[end])
    return chain


def parents_within(trees: Arrays, nodes: Sequence[int]) -> list[int]:
    """Return the parents of a session's nodes as places among them, NONE at the context.

    Parents come before their children.
    """
    t, found, index = trees.views, list[int](), {NONE: NONE}
    for i, node in enumerate(nodes):
        found.append(index[t.parent[node]])
        index[node] = i
    return found


def live(trees: Arrays, session: int) -> list[int]:
    """Return the live nodes of a session, parents first."""
    t = trees.views
    found = siblings_from(t, t.first_root[session])
    for node in found:  # the list grows meanwhile
        found += siblings_from(t, t.first_child[node])
    return found
