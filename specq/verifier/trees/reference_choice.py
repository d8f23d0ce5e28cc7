"""What may be verified, in plain Python: the reference of kernels/choose.h.

Siblings are judged in this order: sampled ones, as they were drawn, then point masses. A node is judged only if all
before it were rejected; its acceptance probability accounts for that. So beside sampled siblings no node is likelier
than those before it, and a cut by probability takes the last first. `probabilistic` is exact only if a sampled node is
cut without looking at its own token (decision 0008): its probability is computed from the draft distribution and from
what was drawn before, never from the drafter's score, and `depends_on` is the last node whose token the scheduler must
know before it may count on this one.

What of drafted trees is hung onto those of sessions, in plain Python: the reference of kernels/select.h.

Of a draft those nodes are kept that are likely enough to be accepted, with all above them, by what became of earlier
ones of their lane; no node is likelier than its parent. Where no node is, the first is tried now and then, so that the
lane learns. Nothing is kept that promises less than is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specq.verification import Calibration
from specq.verifier.trees.arrays import FIRST_OWN_LANE, NONE, Arrays
from specq.verifier.trees.reference_graft import siblings_from

UNTRIED = Calibration()


class Likely(NamedTuple):
    """Places of nodes, and how many accepted tokens they promise."""

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
    """Return the places of those nodes of a session's draft that are hung."""
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
    """Return the nodes that are likely enough; where there is none, the promise is that of the first."""
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
    """Return a session's nodes with a cumulative acceptance probability of at least `floor` and a position before
    `end`; set `reach_prob` and `depends_on`."""
    t = trees.views
    found = offered(t, siblings_from(t, t.first_root[session]), 1.0, NONE, floor, end)
    for node in found:  # which grows meanwhile
        above = node if t.group[node] != NONE else t.depends_on[node]
        found += offered(t, siblings_from(t, t.first_child[node]), t.reach_prob[node], above, floor, end)
    return found


def offered(t: Any, siblings: Sequence[int], reach_prob: float, above: int, floor: float, end: int) -> list[int]:
    """Weigh siblings whose parent has this `reach_prob`; `above` is what the first depends on. Return those that may be
    verified."""
    nodes = weighed(t, siblings, reach_prob)
    for node in nodes:
        t.depends_on[node] = above
        above = node if t.group[node] != NONE else above
    return [node for node in nodes if t.reach_prob[node] >= floor and t.position[node] < end]


def weighed(t: Any, siblings: Sequence[int], reach_prob: float) -> list[int]:
    """Set the `reach_prob` of siblings whose parent has this one; return them in the order of judgement."""
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
    """Return the estimated acceptance of a node given its parent's: as its lane was calibrated, unless its score says
    what was measured elsewhere."""
    if t.is_measured[node] and t.group[node] == NONE:
        return Calibration().probability(t.score[node])
    return calibration_of(t, t.node_lane[node]).probability(t.score[node])


def calibration_of(t: Any, lane: int) -> Calibration:
    """Return the calibration of a lane."""
    return Calibration(memoryview(t.trials.obj[lane]), memoryview(t.accepted.obj[lane]))


def best_chain(t: Any, nodes: Sequence[int], most: int) -> list[int]:
    """Return the chain of at most `most` nodes that promises the most accepted tokens, for engines that take no trees.

    Rule: which nodes are taken depends neither on their own tokens nor on what hangs from these. So of sampled siblings
    only the first is eligible, and what a chain promises counts down to its first sampled node.

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
    """Return the parents of a session's nodes as places among them, NONE at the context; they stand before their
    children."""
    t, found, index = trees.views, list[int](), {NONE: NONE}
    for i, node in enumerate(nodes):
        found.append(index[t.parent[node]])
        index[node] = i
    return found


def live(trees: Arrays, session: int) -> list[int]:
    """Return the live nodes of a session, parents first."""
    t = trees.views
    found = siblings_from(t, t.first_root[session])
    for node in found:  # which grows meanwhile
        found += siblings_from(t, t.first_child[node])
    return found
