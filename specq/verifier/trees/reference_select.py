"""What of drafted trees is hung onto those of sessions, in plain Python: the reference of kernels/select.h.

Of a draft those nodes are kept that are likely enough to be accepted, with all above them, by what became of earlier
ones of their lane; no node is likelier than its parent. Where no node is, the first is tried now and then, so that the
lane learns. Nothing is kept that promises less than is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specq.verification import Calibration
from specq.verifier.trees.arrays import FIRST_OWN_LANE, NONE, Arrays
from specq.verifier.trees.reference_choice import calibration_of

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
