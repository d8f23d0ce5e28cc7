"""Trees that a head has grown, as drafts.

`batch_of_grown` makes drafts from trees that the host has read. `batch_of_unread` makes drafts from trees that a step
verifies before that. These have the likeliest nodes of each level, as many as `level_sizes` asks for.

The step is launched behind the trees. So the device does not wait for the host in between. For each node the host knows
its level, its place in the level, likeliest first, and the usual probability of that place. It does not know the
parent. The first node of the level above stands for it until the tree is read.

Rule: a step takes the first nodes of such a tree in order. The reason: a node needs its ancestors. So no node gets a
higher probability than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.trees.interface import Grown
from specq.drafting.worker import LEAST_CHANCE
from specq.protocol import BoolArray, Float64Array, IntpArray
from specq.verification import DeviceTokens, places_in_runs
from specq.verifier.sources import (
    NEXT_IDS,
    DraftBatch,
    DraftTrees,
    Session,
    StepCurve,
    UnreadLayout,
    hung_unread,
    put_tokens,
)

PRIOR_WEIGHT = 20.0  # weight of the head's own probabilities, in verified nodes of a place
MEMORY = 400.0  # verified nodes of a place after which a count has faded to 1/e
MOST_CHANCE = 0.99
STEP_DOWN = 1 - 1e-6  # maximum ratio of a node's probability to that of the node before

# Trees to choose from, as the nodes of their levels. Each has the most tokens a round among all trees with its number
# of nodes, for an EAGLE-3 head of smollm2 and texts of GSM8K and HumanEval (docs/log/ of 2026-11-26).
SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 1, 1, 1),
    (2, 1, 1, 1, 1, 1),
    (3, 3, 2, 2, 2, 1, 1, 1),
    (5, 4, 4, 4, 4, 4, 3, 3),
)
MOST_ROWS = 256  # rows of all sessions, for every shape but the smallest
LOOK_AGAIN = 32  # rounds after which the choice is made again


class UsualReach:
    """How likely nodes of trees are to be accepted, by level and place.

    It combines the head's own probabilities with the outcomes of verified nodes.
    """

    def __init__(self, depth: int, width: int) -> None:
        """Trees have at most `depth` levels of `width` nodes each."""
        self._promised = np.zeros((depth, width))  # 0: not seen yet
        self._accepted, self._verified = np.zeros((depth, width)), np.zeros((depth, width))

    def promise(self, layout: UnreadLayout, reach: Float64Array) -> None:
        """Add cumulative probabilities f64[trees, n], 0 where there is no node."""
        now = reach.mean(0)
        at = layout.levels, layout.ranks
        before = self._promised[at]
        weight = min(len(reach) / PRIOR_WEIGHT, 1.0)
        self._promised[at] = np.where(before > 0, before + weight * (now - before), now)

    def learn(self, layout: UnreadLayout, counts: IntpArray, is_accepted: BoolArray) -> None:
        """Add the outcomes of trees whose first nodes were verified.

        counts        i64[trees]: how many nodes of each tree were verified.
        is_accepted   bool[verified], tree after tree.
        """
        places = places_in_runs(counts)
        num_verified = np.bincount(places, minlength=len(layout.levels))
        num_accepted = np.bincount(places, is_accepted, len(layout.levels))
        at = layout.levels, layout.ranks
        kept = np.exp(-num_verified / MEMORY)
        self._verified[at] = self._verified[at] * kept + num_verified
        self._accepted[at] = self._accepted[at] * kept + num_accepted

    def of(self, layout: UnreadLayout) -> Float64Array | None:
        """Return how likely each node is, f64[n], never more than the node before; None if a place was never seen."""
        at = layout.levels, layout.ranks
        if (layout.levels[-1] >= len(self._promised)) or not self._promised[at].all():
            return None
        likely = (PRIOR_WEIGHT * self._promised[at] + self._accepted[at]) / (PRIOR_WEIGHT + self._verified[at])
        falling = np.sort(np.clip(likely, LEAST_CHANCE, MOST_CHANCE))[::-1]
        steps = STEP_DOWN ** np.arange(len(falling))
        found: Float64Array = np.minimum.accumulate(falling / steps) * steps
        return found


def shapes_for(num_sessions: int, depth: int) -> list[tuple[int, ...]]:
    """Return the shapes of at most `depth` levels that may pay off with `num_sessions` sessions, the smallest first."""
    cut = dict.fromkeys(shape[:depth] for shape in SHAPES)
    return [shape for i, shape in enumerate(cut) if not i or num_sessions * (1 + sum(shape)) <= MOST_ROWS]


def best_shape(
    num_sessions: int, depth: int, usual: UsualReach, curve: StepCurve, level_share: float
) -> tuple[int, ...]:
    """Return the shape with the most tokens a second.

    A shape with unknown probabilities is returned before all others, the largest first.

    level_share: time of drafting a level, as a share of a step without drafts.
    """
    shapes = shapes_for(num_sessions, depth)[::-1]
    level_s = level_share * curve.profiled(num_sessions)
    best, most = shapes[-1], 0.0
    for shape in shapes:
        likely = usual.of(UnreadLayout.of(shape))
        if likely is None:
            return shape
        num_nodes = num_sessions * len(likely)
        seconds = curve(num_sessions + num_nodes, num_nodes) + level_s * len(shape)
        tokens_per_s = (1 + likely.sum()) / seconds
        if tokens_per_s > most:
            best, most = shape, tokens_per_s
    return best


class ShapeChoice:
    """The shape of trees by the number of sessions.

    It is chosen only now and then, because the device waits for the choice.

    usual: the probabilities that the choice uses.
    """

    def __init__(self, depth: int, level_share: float) -> None:
        """Trees have at most `depth` levels; `level_share` is as for `best_shape`."""
        self.usual = UsualReach(depth, max(map(max, SHAPES)))
        self._depth, self._level_share = depth, level_share
        self._known: dict[int, tuple[tuple[int, ...], int]] = {}  # shapes, and the rounds for which they still hold

    def choose(self, num_sessions: int, curve: StepCurve) -> tuple[int, ...]:
        """Return the shape for a round of `num_sessions` sessions."""
        shape, num_left = self._known.get(num_sessions, ((), 0))
        if not num_left:
            shape = best_shape(num_sessions, self._depth, self.usual, curve, self._level_share)
            num_left = LOOK_AGAIN if self.usual.of(UnreadLayout.of(shape)) is not None else 1
        self._known[num_sessions] = shape, num_left - 1
        return shape


def batch_of_unread(
    sessions: Sequence[Session],
    drafted: DeviceTokens,
    layout: UnreadLayout,
    depths: IntpArray,
    likely: Float64Array,
    lane: int,
) -> DraftBatch:
    """Return trees as a batch, in a lane.

    drafted  nodes [sessions * n], one tree after the other, with their lines.
    depths   i64[sessions]: how many levels each session takes. 0: none.
    likely   f64[n]: as from `UsualReach.of`.
    """
    above = np.where(layout.parents < 0, 1.0, likely[layout.parents])
    places = np.arange(len(sessions) * len(likely)).reshape(len(sessions), -1)
    return hung_unread(sessions, drafted, layout, depths, places, np.log(likely / above), lane)


def put_read(trees: DraftTrees, drafted: DeviceTokens, grown: Grown) -> None:
    """Replace all handles by the values that were read: tokens, scores, and parents.

    Sessions with handles have no other nodes.
    """
    assert drafted.values is not None, "they have been read"
    nodes, places = put_tokens(trees, drafted.values, np.fmax(grown.scores, np.log(LEAST_CHANCE)).reshape(-1))
    trees.is_measured[nodes] = False
    if drafted.tree is None:  # chains
        return
    order = np.argsort(places)
    nodes, of_trees = nodes[order], places[order] // drafted.tree.size
    ends = np.flatnonzero(np.diff(of_trees, append=-1)) + 1
    for own, tree in zip(np.split(nodes, ends[:-1]), of_trees[ends - 1].tolist(), strict=True):
        trees.hang_anew(int(trees.node_session[own[0]]), own.tolist(), grown.parents[tree, : len(own)].tolist())


def batch_of_grown(grown: Grown, sessions: Sequence[Session], wanted: BoolArray, lane: int, least: float) -> DraftBatch:
    """Return the wanted nodes, bool[m, n], as drafts; a node's ancestors must be, too.

    Scores are raised to at least `least`.
    """
    places = np.cumsum(wanted, 1) - 1  # among the wanted
    parents = np.where(grown.parents < 0, -1, np.take_along_axis(places, np.maximum(grown.parents, 0), 1))
    return DraftBatch(
        sessions=sessions,
        lanes=lane,
        base_lens=[session.length for session in sessions],
        first_ids=NEXT_IDS,
        sizes=wanted.sum(1),
        token_ids=grown.token_ids[wanted],
        parent_ids=parents[wanted].astype(np.int32),
        scores=np.maximum(grown.scores[wanted], least),
    )
