"""Trees that a head has grown, as drafts: those that the host has read (`batch_of_grown`), and those that a step
verifies before that: the likeliest nodes of each level, as many as it was asked for (`level_sizes`).

The step is launched behind the trees, so the device does not wait for the host in between. Of each node the host knows
its level and its place in it, likeliest first, and what nodes of that place have promised so far. Which node of the
level above is its parent, it does not know: the first one stands for it until the tree is read.

Rule: of such a tree a step has the first nodes, as they stand, since whatever is taken must come with what is above it.
So no node is said to be likelier than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.eagle3.interface import Grown
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

PRIOR_WEIGHT = 20.0  # verified nodes that what the head says of a place counts for
MEMORY = 400.0  # verified nodes of a place, after which a count has faded to 1/e
MOST_CHANCE = 0.99
STEP_DOWN = 1 - 1e-6  # by which a node is less likely than the one before, at least

# Trees that are tried, by the nodes of their levels: those with the most tokens a round among all of as many nodes, for
# an EAGLE-3 head of smollm2 and texts of GSM8K and HumanEval (docs/log/heads.md of 2026-11-26).
SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 1, 1, 1),
    (2, 1, 1, 1, 1, 1),
    (3, 3, 2, 2, 2, 1, 1, 1),
    (5, 4, 4, 4, 4, 4, 3, 3),
)
MOST_ROWS = 256  # of all sessions, of a shape but the smallest
LOOK_AGAIN = 32  # rounds after which another shape may be better
LEVEL_SHARE = 0.08  # of a step without drafts, that a level of a head takes


class UsualReach:
    """How likely nodes of trees are to be accepted, by level and place: what a head says of them, and what became of
    those that were verified."""

    def __init__(self, depth: int, width: int) -> None:
        """So many levels of so many nodes at most."""
        self._promised = np.zeros((depth, width))  # 0 where nothing was seen
        self._accepted, self._verified = np.zeros((depth, width)), np.zeros((depth, width))

    def promise(self, layout: UnreadLayout, reach: Float64Array) -> None:
        """Take in cumulative probabilities f64[trees, n], 0 where there is no node."""
        now = reach.mean(0)
        at = layout.levels, layout.ranks
        before = self._promised[at]
        weight = min(len(reach) / PRIOR_WEIGHT, 1.0)
        self._promised[at] = np.where(before > 0, before + weight * (now - before), now)

    def learn(self, layout: UnreadLayout, counts: IntpArray, is_accepted: BoolArray) -> None:
        """Take in what became of trees, of each of which its first nodes were verified, so many: is_accepted
        bool[verified], tree after tree."""
        places = places_in_runs(counts)
        num_verified = np.bincount(places, minlength=len(layout.levels))
        num_accepted = np.bincount(places, is_accepted, len(layout.levels))
        at = layout.levels, layout.ranks
        kept = np.exp(-num_verified / MEMORY)
        self._verified[at] = self._verified[at] * kept + num_verified
        self._accepted[at] = self._accepted[at] * kept + num_accepted

    def of(self, layout: UnreadLayout) -> Float64Array | None:
        """Return how likely each node is, f64[n], none likelier than the one before; None if something of the kind was
        never seen."""
        at = layout.levels, layout.ranks
        if (layout.levels[-1] >= len(self._promised)) or not self._promised[at].all():
            return None
        likely = (PRIOR_WEIGHT * self._promised[at] + self._accepted[at]) / (PRIOR_WEIGHT + self._verified[at])
        falling = np.sort(np.clip(likely, LEAST_CHANCE, MOST_CHANCE))[::-1]
        steps = STEP_DOWN ** np.arange(len(falling))
        found: Float64Array = np.minimum.accumulate(falling / steps) * steps
        return found


def shapes_for(num_sessions: int, depth: int) -> list[tuple[int, ...]]:
    """Return the shapes that may pay with so many sessions, of so many levels at most, the smallest first."""
    cut = dict.fromkeys(shape[:depth] for shape in SHAPES)
    return [shape for i, shape in enumerate(cut) if not i or num_sessions * (1 + sum(shape)) <= MOST_ROWS]


def best_shape(num_sessions: int, depth: int, usual: UsualReach, curve: StepCurve) -> tuple[int, ...]:
    """Return the shape with the most tokens a second; one of which something is not known, before all others, the
    largest first."""
    shapes = shapes_for(num_sessions, depth)[::-1]
    level_s = LEVEL_SHARE * curve.profiled(num_sessions)
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
    """Which shape trees have, by the number of sessions: looked for now and then, since the device waits for it.
    `usual`: by what."""

    def __init__(self, depth: int) -> None:
        """Trees have so many levels at most."""
        self.usual = UsualReach(depth, max(map(max, SHAPES)))
        self._depth = depth
        self._known: dict[int, tuple[tuple[int, ...], int]] = {}  # shapes, and for how many rounds more

    def choose(self, num_sessions: int, curve: StepCurve) -> tuple[int, ...]:
        """Return the shape for a round of so many sessions."""
        shape, num_left = self._known.get(num_sessions, ((), 0))
        if not num_left:
            shape = best_shape(num_sessions, self._depth, self.usual, curve)
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

    drafted  nodes [sessions * n], of one tree after the other, with their lines
    depths   i64[sessions]: how many levels each session takes; 0: none
    likely   f64[n]: as of `UsualReach.of`
    """
    above = np.where(layout.parents < 0, 1.0, likely[layout.parents])
    places = np.arange(len(sessions) * len(likely)).reshape(len(sessions), -1)
    return hung_unread(sessions, drafted, layout, depths, places, np.log(likely / above), lane)


def put_read(trees: DraftTrees, drafted: DeviceTokens, grown: Grown) -> None:
    """Put what was read in the place of all handles: tokens, scores, and parents. Sessions that have some have no other
    nodes."""
    assert drafted.values is not None, "they have been read"
    nodes, places = put_tokens(trees, drafted.values, np.fmax(grown.scores, np.log(LEAST_CHANCE)).reshape(-1))
    trees.is_measured[nodes] = False
    if drafted.tree is None:  # they are chains
        return
    order = np.argsort(places)
    nodes, of_trees = nodes[order], places[order] // drafted.tree.size
    ends = np.flatnonzero(np.diff(of_trees, append=-1)) + 1
    for own, tree in zip(np.split(nodes, ends[:-1]), of_trees[ends - 1].tolist(), strict=True):
        trees.hang_anew(int(trees.node_session[own[0]]), own.tolist(), grown.parents[tree, : len(own)].tolist())


def batch_of_grown(grown: Grown, sessions: Sequence[Session], wanted: BoolArray, lane: int, least: float) -> DraftBatch:
    """Return the nodes that are wanted, bool[m, n], as drafts; with a node those above it must be. Scores are `least`
    at least."""
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
