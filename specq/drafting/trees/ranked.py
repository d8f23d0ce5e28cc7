"""Trees from the likeliest tokens of each position ahead, predicted independently of the tokens before it.

A node's probability is the product of its own and its ancestors'. The `most` likeliest nodes are those of a best-first
search (DDTree, arXiv 2604.12989). Each of them is among the `most` likeliest of its level, and so is its parent. So it
is enough to keep that many nodes of each level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from specq.drafting.interface import Pending
from specq.drafting.rank_trees import RankTree
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.protocol import Float32Array, Int32Array, IntpArray

CHOICES = 10  # tokens of a position, for trees that grow best first


class Ranked(NamedTuple):
    """Predictions for the positions after some contexts.

    token_ids  i32[contexts, places, count]: the likeliest tokens of each position, likeliest first.
    scores     f32[contexts, places, count]: their log-probabilities. -inf where there is no such token.
    """

    token_ids: Int32Array
    scores: Float32Array

    @classmethod
    def joined(cls, parts: Sequence[tuple[IntpArray, Ranked]]) -> Ranked:
        """Return the predictions for all contexts from those of parts, each with the indices of its contexts."""
        if len(parts) == 1:
            return parts[0][1]
        shape = sum(len(which) for which, _ in parts), *parts[0][1].scores.shape[1:]
        found = cls(np.empty(shape, np.int32), np.empty(shape, np.float32))
        for which, own in parts:
            found.token_ids[which], found.scores[which] = own
        return found


RankWait = Callable[[], Ranked]  # waits for predictions


def num_choices(requests: Sequence[TreeRequest]) -> int:
    """Return how many tokens of each position the trees of some requests need."""
    return max(CHOICES if one.ranks is None else one.ranks.num_ranks for one in requests)


def grow_each(requests: Sequence[TreeRequest], wait: RankWait) -> list[Pending[Grown]]:
    """Return the trees of requests; `wait`: returns the predictions of all their contexts, in order."""
    ranked = cache(wait)

    def grow(request: TreeRequest, end: int) -> Grown:
        own = slice(end - len(request.session_ids), end)
        token_ids, scores = ranked()
        return grow_ranked(Ranked(token_ids[own], scores[own]), request)

    ends = np.cumsum([len(one.session_ids) for one in requests]).tolist()
    return [Pending(partial(grow, one, end)) for one, end in zip(requests, ends, strict=True)]


def grow_ranked(ranked: Ranked, request: TreeRequest) -> Grown:
    """Return the trees that a request asks for, of the contexts in its order."""
    depth = min(request.depth, ranked.scores.shape[1])
    if request.ranks is not None:
        return of_shape(ranked, request.ranks, depth)
    return likeliest_nodes(ranked, request.level_sizes or (request.most,) * depth)


def likeliest_nodes(ranked: Ranked, level_sizes: Sequence[int]) -> Grown:
    """Return the likeliest nodes of each level, likeliest first. `level_sizes`: the most nodes of each."""
    num_trees, _, count = ranked.scores.shape
    reach, first, found = np.zeros((num_trees, 1), np.float32), -1, list[Grown]()
    for depth, size in enumerate(level_sizes):
        own = ranked.scores[:, depth]
        of_all = (reach[:, :, None] + own[:, None]).reshape(num_trees, -1)
        chosen = _likeliest(of_all, size)
        tokens = np.take_along_axis(ranked.token_ids[:, depth], chosen % count, 1)
        scores = np.take_along_axis(own, chosen % count, 1)
        parents = (first + chosen // count).astype(np.int32)
        first = first + reach.shape[1] if depth else 0
        reach = np.take_along_axis(of_all, chosen, 1)
        found.append(Grown(tokens, scores, reach, parents, np.full(chosen.shape[1], depth)))
    return Grown(*(np.concatenate(parts, -1) for parts in zip(*found, strict=True)))


def _likeliest(reach: Float32Array, count: int) -> IntpArray:
    """Return the indices of the likeliest, i64[m, at most count], likeliest first."""
    if count < reach.shape[1]:
        which = np.argpartition(-reach, count - 1, 1)[:, :count]
        order = np.argsort(-np.take_along_axis(reach, which, 1), 1, kind="stable")
        return np.take_along_axis(which, order, 1)
    return np.argsort(-reach, 1, kind="stable")


def of_shape(ranked: Ranked, tree: RankTree, depth: int) -> Grown:
    """Return the nodes of a shape, down to a depth. Nodes of missing ranks have the reach -inf."""
    scores = tree.scores(ranked.scores[:, :depth])
    depths = np.minimum(tree.depths, ranked.token_ids.shape[1] - 1)
    ranks = np.minimum(tree.ranks, ranked.token_ids.shape[2] - 1)
    parents = np.broadcast_to(tree.parents.astype(np.int32), scores.shape)
    return Grown(ranked.token_ids[:, depths, ranks], scores, tree.reach(scores), parents, tree.depths)
