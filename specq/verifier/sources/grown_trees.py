"""Trees that a head grows level by level, since what it says of a place depends on what stands before it: of several contexts at once.

Best first, as EAGLE-2's (Li et al. 2024, arXiv 2406.16858): at each level the likeliest nodes are expanded, by their cumulative probability,
and of all that were found the likeliest are kept. Or of the shape that a job or the configuration asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specq.proposers import Growth, Ranked
from specq.protocol import BoolArray, Float32Array, Int32Array, IntpArray
from specq.verifier.grafting import DraftBatch
from specq.verifier.session import Session
from specq.verifier.sources.rank_trees import RankTree, likeliest
from specq.verifier.trees import NEXT_IDS

WIDTH = 8  # children of a node that is expanded
BEAM = 4  # nodes of a tree that are expanded at a level


class Grown(NamedTuple):
    """Nodes of m trees, as many of each, parents before children.

    token_ids i32[m, n]; scores f32[m, n]: log-probabilities given the parent; reach f32[m, n]: with those above; -inf: no node
    parents i64[m, n]: places among the tree's nodes; -1: the context
    """

    token_ids: Int32Array
    scores: Float32Array
    reach: Float32Array
    parents: IntpArray

    def batch(self, sessions: Sequence[Session], wanted: BoolArray, lane: int, least: float) -> DraftBatch:
        """Return the nodes that are wanted, bool[m, n], as drafts; with a node those above it must be. Scores are `least` at least."""
        places = np.cumsum(wanted, 1) - 1  # among the wanted
        parents = np.where(self.parents < 0, -1, np.take_along_axis(places, np.maximum(self.parents, 0), 1))
        return DraftBatch(
            sessions=sessions,
            lanes=lane,
            base_lens=[session.length for session in sessions],
            first_ids=NEXT_IDS,
            sizes=wanted.sum(1),
            token_ids=self.token_ids[wanted],
            parent_ids=parents[wanted].astype(np.int32),
            scores=np.maximum(self.scores[wanted], least),
        )


class _Levels:
    """Grown levels; `rows`: where the rows of the last one stand among all nodes, i64[m, rows], -1 for the contexts."""

    def __init__(self) -> None:
        self._parts: list[Grown] = []
        self.num_nodes = 0

    def add(self, ranked: Ranked, columns: IntpArray, rows: IntpArray, above: Float32Array) -> Grown:
        """Add nodes: of what is ranked behind rows [m, rows, count] these, as places in all of it, i64[m, n]; rows i64[m, rows]: which
        nodes the rows are; above f32[m, rows]: how far these reach."""
        behind = columns // ranked.token_ids.shape[2]
        num_contexts = len(columns)
        token_ids = np.take_along_axis(ranked.token_ids.reshape(num_contexts, -1), columns, 1)
        scores = np.take_along_axis(ranked.scores.reshape(num_contexts, -1), columns, 1)
        reach = np.take_along_axis(above, behind, 1) + scores
        level = Grown(token_ids, scores, reach.astype(np.float32), np.take_along_axis(rows, behind, 1))
        self._parts.append(level)
        self.num_nodes += columns.shape[1]
        return level

    def all(self) -> Grown:
        return Grown(*(np.concatenate(parts, 1) for parts in zip(*self._parts, strict=True)))


def grow_best_first(growth: Growth, num_contexts: int, depth: int, most: int, floor: float) -> tuple[Grown, BoolArray]:
    """Return nodes of trees of at most so many levels, and which are wanted: the `most` likeliest that reach `floor`. No level is computed
    below which nothing could be wanted."""
    levels = _Levels()
    rows, above = np.full((num_contexts, 1), -1, np.intp), np.zeros((num_contexts, 1), np.float32)
    for level in range(depth):
        ranked = growth.ranked(WIDTH)
        first = levels.num_nodes
        every = np.broadcast_to(np.arange(ranked.scores[0].size), (num_contexts, ranked.scores[0].size))
        found = levels.add(ranked, every, rows, above)
        best = np.argsort(-found.reach, 1, kind="stable")[:, :BEAM]
        above = np.take_along_axis(found.reach, best, 1)
        if level + 1 == depth or above.max() < floor:
            break
        rows = first + best
        growth.expand(best // ranked.scores.shape[2], np.take_along_axis(found.token_ids, best, 1))
    grown = levels.all()
    return grown, likeliest(grown.reach, most, floor)


def grow_shape(growth: Growth, num_contexts: int, tree: RankTree, most: int) -> tuple[Grown, BoolArray]:
    """Return the nodes of a tree, level by level, and which are wanted: all that there are, at most the `most` likeliest."""
    levels = _Levels()
    place = np.full(len(tree.depths) + 1, -1, np.intp)  # of the tree's nodes among those that were grown
    rows, above = np.full((num_contexts, 1), -1, np.intp), np.zeros((num_contexts, 1), np.float32)
    expanded: IntpArray = np.array([-1], np.intp)  # the tree's nodes that are the last level's rows; -1: the context
    for depth in range(int(tree.depths.max()) + 1):
        own = np.flatnonzero(tree.depths == depth)
        ranked = growth.ranked(int(tree.ranks[own].max()) + 1)
        count = ranked.token_ids.shape[2]
        own = own[(tree.ranks[own] < count) & np.isin(tree.parents[own], expanded)]
        behind = np.array([expanded.tolist().index(parent) for parent in tree.parents[own].tolist()], np.intp)
        place[own] = levels.num_nodes + np.arange(len(own))
        columns = np.broadcast_to(behind * count + tree.ranks[own], (num_contexts, len(own)))
        found = levels.add(ranked, columns, rows, above)
        chosen = np.flatnonzero(np.isin(own, tree.parents))  # of this level, those that have children
        if not len(chosen):
            break
        expanded = own[chosen]
        rows = np.broadcast_to(place[expanded], (num_contexts, len(expanded)))
        above = found.reach[:, chosen]
        behind_of = np.broadcast_to(behind[chosen], (num_contexts, len(chosen)))
        growth.expand(behind_of, found.token_ids[:, chosen])
    grown = levels.all()
    return grown, likeliest(grown.reach, most, -np.inf)
