"""Trees of ranks: which node is the how-manieth choice at its depth, below which other node; for heads, which say of
each place ahead what is likely there, whatever stands before it.

What a job asks for (`specq.drafting.worker.shapes`) is such a tree. Where it asks for nothing, the tree is grown best
first: of a wide tree the nodes are taken that are likeliest to lie on the target's path. `DraftingParams`: with which
sampling parameters each session is drafted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from specq.config import read_tree
from specq.drafting.worker import BestFirst, DraftShape, Path, drafting_params, shape_of
from specq.protocol import BoolArray, ConfigError, Float32Array, IntpArray, JobError, SamplingParams, Speculation
from specq.verifier.sources import Session

WIDTH = 10  # choices at a place, of a tree that is grown best first
MANY_PATHS = 4096  # of a shape, beyond which it is cut


@dataclass(frozen=True, slots=True, eq=False)
class RankTree:
    """Nodes, parents before children. depths, ranks, parents i64[n]: from 0; a parent is a place among the nodes, -1
    for the context.

    is_fixed   all nodes are wanted, whatever they promise
    """

    depths: IntpArray
    ranks: IntpArray
    parents: IntpArray
    is_fixed: bool

    @classmethod
    def of(cls, paths: list[Path], *, is_fixed: bool) -> Self:
        """Return a closed set of paths, prefixes first, as a tree."""
        place = {path: i for i, path in enumerate(paths)}
        depths = np.array([len(path) - 1 for path in paths], np.intp)
        ranks = np.array([path[-1] for path in paths], np.intp)
        return cls(depths, ranks, np.array([place.get(path[:-1], -1) for path in paths], np.intp), is_fixed)

    @property
    def num_ranks(self) -> int:
        return int(self.ranks.max(initial=-1)) + 1

    def scores(self, scores: Float32Array) -> Float32Array:
        """Return f32[m, n]: the score of each node, given those f32[m, places, ranks] of m contexts; -inf beyond."""
        is_known = (self.depths < scores.shape[1]) & (self.ranks < scores.shape[2])
        found = scores[:, np.where(is_known, self.depths, 0), np.where(is_known, self.ranks, 0)]
        return np.where(is_known, found, np.float32(-np.inf))

    def reach(self, scores: Float32Array) -> Float32Array:
        """Return f32[m, n]: the score of each node with those above it, given its own f32[m, n]."""
        found = scores.copy()
        for depth in range(1, int(self.depths.max(initial=0)) + 1):
            own = np.flatnonzero(self.depths == depth)
            found[:, own] += found[:, self.parents[own]]
        return found

    def likeliest(self, reach: Float32Array, most: int, floor: float) -> BoolArray:
        """Return which of these nodes are `likeliest`; all of a fixed tree that may be."""
        return likeliest(reach, most, -np.inf if self.is_fixed else floor)


def likeliest(reach: Float32Array, most: int, floor: float) -> BoolArray:
    """Return bool[m, n]: of each context the `most` likeliest nodes of those that may be and reach `floor`, given
    f32[m, n], parents before children. With a node come those above it, which are no less likely."""
    wanted = np.isfinite(reach) & (reach >= floor)
    if most < reach.shape[1]:
        order = np.argsort(-reach, axis=1, kind="stable")  # a parent comes first among equals
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(reach.shape[1])[None], 1)
        wanted &= place < most
    return wanted


@lru_cache(maxsize=256)
def tree_for(speculation: Speculation, num_places: int, default: tuple[Path, ...] = ()) -> RankTree:
    """Return the tree that a job asks for, at most so many places deep; `default`: the paths of one that asks for
    nothing, else it is best first."""
    asked = Speculation(tree=default) if default and not speculation.has_fixed_shape else speculation
    shape = shape_of(asked, fan_out=WIDTH, max_ahead=num_places)
    depth = min(num_places, speculation.max_depth or num_places)
    if isinstance(shape, BestFirst):
        return RankTree.of(_paths_by_product(min(shape.max_depth, depth)), is_fixed=False)
    return RankTree.of(_paths(shape, min(shape.max_depth, depth)), is_fixed=True)


def _paths(shape: DraftShape, depth: int) -> list[Path]:
    """Return all paths of a shape down to a depth, prefixes first."""
    found: list[Path] = []
    level: list[Path] = [()]
    for _ in range(depth):
        # What follows the verdict is not known beforehand, as after a miss.
        level = [(*path, rank) for path in level for rank in range(shape.num_children(path, hit=False))]
        found += level[: max(MANY_PATHS - len(found), 0)]
    return found


def _paths_by_product(depth: int) -> list[Path]:
    """Return the paths of which the product of all (rank + 1) is at most WIDTH, prefixes first: the chance of a choice
    falls about as 1 / (rank + 1), so these are nearly all that may be likely."""
    found: list[Path] = []
    level: list[tuple[Path, int]] = [((), 1)]
    for _ in range(depth):
        level = [((*path, rank), product * (rank + 1)) for path, product in level for rank in range(WIDTH // product)]
        found += [path for path, _ in level]
    return found


def checked_tree(said: str, most: int, why: str) -> tuple[Path, ...]:
    """Return the paths that `heads_tree` gives; ConfigError for none, and for those that are deeper than `most`. why:
    what limits them."""
    if not said:
        return ()
    try:
        paths = Speculation.from_dict({"tree": read_tree(said)}).tree
    except JobError as error:
        raise ConfigError(f"target.heads_tree: {error}") from None
    deepest = max(paths, key=len, default=())
    if len(deepest) > most:
        raise ConfigError(
            f"target.heads_tree has the path {list(deepest)}, which is {len(deepest)} deep; {why}, so paths may have "
            f"{most} ranks at most"
        )
    return paths


def rooms_of(sessions: Sequence[Session]) -> list[int]:
    """Return how many levels the tree of each session may have; the correction takes one position itself."""
    if not sessions:
        return []
    limits: list[int] = sessions[0].trees.limit[[one.place for one in sessions]].tolist()
    return [limit - len(one.token_ids) - 1 for one, limit in zip(sessions, limits, strict=True)]


class DraftingParams:
    """Parameters by session. The same object comes each time, as long as the session's own stay."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[SamplingParams, Speculation, SamplingParams]] = {}

    def of(self, session: Session) -> SamplingParams:
        """Return those of a session."""
        known = self._known.get(session.session_id)
        if known is None or known[0] is not session.params or known[1] is not session.speculation:
            drafting = drafting_params(session.params, session.speculation)
            known = self._known[session.session_id] = session.params, session.speculation, drafting
        return known[2]

    def forget(self, session_id: int) -> None:
        """Forget a session, known or not."""
        self._known.pop(session_id, None)
