"""Trees grown level by level in plain NumPy, for toy heads and for comparison.

A `Growth` gives the likely tokens behind each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specq.drafting.eagle3.levels import BEAM, WIDTH
from specq.drafting.rank_trees import RankTree
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.ranked import Ranked
from specq.protocol import Float32Array, Int32Array, IntpArray


class Growth(Protocol):
    """Trees that grow below some contexts, with equal numbers of rows per level."""

    def ranked(self, count: int) -> Ranked:
        """Return the likeliest tokens, at most `count`, behind each row of the last level, [contexts, rows, count].

        The first level is behind the contexts, one row each.
        """
        ...

    def expand(self, parents: IntpArray, token_ids: Int32Array) -> None:
        """Go one level down: tokens i32[contexts, rows], behind these rows i64[contexts, rows] of the last level."""
        ...


class _Levels:
    """Grown levels. `rows`: indices of the last level's rows among all nodes, i64[m, rows]. -1: the contexts."""

    def __init__(self) -> None:
        self._parts: list[Grown] = []
        self.num_nodes = 0

    def add(self, ranked: Ranked, columns: IntpArray, rows: IntpArray, above: Float32Array) -> Grown:
        """Add nodes, chosen from the ranked tokens.

        - `ranked`: tokens behind rows, [m, rows, count].
        - `columns`: i64[m, n], places in all ranked tokens.
        - `rows`: i64[m, rows], the nodes of the rows.
        - `above`: f32[m, rows], the reach of the rows.
        """
        behind = columns // ranked.token_ids.shape[2]
        num_contexts = len(columns)
        token_ids = np.take_along_axis(ranked.token_ids.reshape(num_contexts, -1), columns, 1)
        scores = np.take_along_axis(ranked.scores.reshape(num_contexts, -1), columns, 1)
        reach = np.take_along_axis(above, behind, 1) + scores
        parents = np.take_along_axis(rows, behind, 1).astype(np.int32)
        depths = np.full(columns.shape[1], len(self._parts))
        level = Grown(token_ids, scores, reach.astype(np.float32), parents, depths)
        self._parts.append(level)
        self.num_nodes += columns.shape[1]
        return level

    def all(self) -> Grown:
        return Grown(*(np.concatenate(parts, -1) for parts in zip(*self._parts, strict=True)))


def grow_best_first(growth: Growth, num_contexts: int, depth: int, floor: float = -np.inf) -> Grown:
    """Return nodes of trees with at most `depth` levels. A level that cannot reach the floor is not computed."""
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
    return levels.all()


def grow_sizes(growth: Growth, num_contexts: int, level_sizes: Sequence[int]) -> Grown:
    """Return nodes of trees that are grown best first, with `level_sizes` nodes per level."""
    levels = _Levels()
    rows, above = np.full((num_contexts, 1), -1, np.intp), np.zeros((num_contexts, 1), np.float32)
    for level, size in enumerate(level_sizes):
        ranked = growth.ranked(WIDTH)
        reach = (above[:, :, None] + ranked.scores).reshape(num_contexts, -1)
        first, columns = levels.num_nodes, np.argsort(-reach, 1, kind="stable")[:, :size]
        found = levels.add(ranked, columns, rows, above)
        above, best = found.reach[:, :BEAM], columns[:, :BEAM]
        rows = np.broadcast_to(first + np.arange(best.shape[1]), best.shape)
        if level + 1 < len(level_sizes):
            growth.expand(best // ranked.scores.shape[2], found.token_ids[:, :BEAM])
    return levels.all()


def grow_shape(growth: Growth, num_contexts: int, tree: RankTree) -> Grown:
    """Return the nodes of a tree, level by level."""
    levels = _Levels()
    place = np.full(len(tree.depths) + 1, -1, np.intp)  # of the tree's nodes among the grown nodes
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
        chosen = np.flatnonzero(np.isin(own, tree.parents))  # nodes of this level with children
        if not len(chosen):
            break
        expanded = own[chosen]
        rows = np.broadcast_to(place[expanded], (num_contexts, len(expanded)))
        above = found.reach[:, chosen]
        behind_of = np.broadcast_to(behind[chosen], (num_contexts, len(chosen)))
        growth.expand(behind_of, found.token_ids[:, chosen])
    return levels.all()


def lines_of(parents: Int32Array, levels: IntpArray, beyond: int = 0) -> Int32Array:
    """Return i32[levels, m, n]: the lines of nodes, one by one, given parents i32[m, n] and levels i64[n].

    `beyond`: the value at deeper levels. See `specq.drafting.trees.interface.DeviceNodes`.
    """
    num_trees, num_nodes = parents.shape
    found = np.full((int(levels.max()) + 1, num_trees, num_nodes), beyond, np.int32)
    for tree in range(num_trees):
        for node in range(num_nodes):
            above = node
            for level in range(int(levels[node]), -1, -1):
                found[level, tree, node] = above
                above = parents[tree, above]
    return found


def grow(growth: Growth, request: TreeRequest) -> Grown:
    """Return the result of a request."""
    num_trees = len(request.session_ids)
    if request.level_sizes:
        return grow_sizes(growth, num_trees, request.level_sizes)
    if request.ranks is None:
        return grow_best_first(growth, num_trees, request.depth, request.floor)
    return grow_shape(growth, num_trees, request.ranks)
