"""Trees of ranks: for each node its rank among its siblings, and its parent.

A job may ask for such a tree (`specq.drafting.worker.shapes`), or the configuration. Else trees grow best first.
`DraftingParams` keeps the sampling parameters with which each session is drafted for.
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

MANY_PATHS = 4096  # paths of a shape; further ones are cut


@dataclass(frozen=True, slots=True, eq=False)
class RankTree:
    """Nodes, parents before children.

    depths, ranks, parents   i64[n], counted from 0. A parent is an index of a node, -1 for the context.
    """

    depths: IntpArray
    ranks: IntpArray
    parents: IntpArray

    @classmethod
    def of(cls, paths: list[Path]) -> Self:
        """Return a closed set of paths, prefixes first, as a tree."""
        place = {path: i for i, path in enumerate(paths)}
        depths = np.array([len(path) - 1 for path in paths], np.intp)
        ranks = np.array([path[-1] for path in paths], np.intp)
        return cls(depths, ranks, np.array([place.get(path[:-1], -1) for path in paths], np.intp))

    @property
    def num_ranks(self) -> int:
        return int(self.ranks.max(initial=-1)) + 1

    def scores(self, scores: Float32Array) -> Float32Array:
        """Return f32[m, n]: the score of each node, from scores f32[m, places, ranks] of m contexts.

        It is -inf for nodes outside these scores.
        """
        is_known = (self.depths < scores.shape[1]) & (self.ranks < scores.shape[2])
        found = scores[:, np.where(is_known, self.depths, 0), np.where(is_known, self.ranks, 0)]
        return np.where(is_known, found, np.float32(-np.inf))

    def reach(self, scores: Float32Array) -> Float32Array:
        """Return f32[m, n]: each node's score plus the scores of its ancestors, given its own f32[m, n]."""
        found = scores.copy()
        for depth in range(1, int(self.depths.max(initial=0)) + 1):
            own = np.flatnonzero(self.depths == depth)
            found[:, own] += found[:, self.parents[own]]
        return found


def likeliest(reach: Float32Array, most: int, floor: float) -> BoolArray:
    """Return bool[m, n]: for each context, the `most` likeliest finite nodes that reach `floor`.

    reach: f32[m, n], parents before children. A node's ancestors are selected with it, because they are never less
    likely.
    """
    wanted = np.isfinite(reach) & (reach >= floor)
    if most < reach.shape[1]:
        order = np.argsort(-reach, axis=1, kind="stable")  # a parent comes first among equals
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(reach.shape[1])[None], 1)
        wanted &= place < most
    return wanted


@lru_cache(maxsize=256)
def tree_for(speculation: Speculation, num_places: int, default: tuple[Path, ...] = ()) -> RankTree | None:
    """Return the tree that a job asks for, at most `num_places` deep; None: best first.

    default: the paths for a job that asks for no tree.
    """
    asked = Speculation(tree=default) if default and not speculation.has_fixed_shape else speculation
    shape = shape_of(asked, fan_out=1, max_ahead=num_places)
    if isinstance(shape, BestFirst):
        return None
    return RankTree.of(_paths(shape, min(shape.max_depth, num_places, speculation.max_depth or num_places)))


def _paths(shape: DraftShape, depth: int) -> list[Path]:
    """Return all paths of a shape down to a depth, prefixes first."""
    found: list[Path] = []
    level: list[Path] = [()]
    for _ in range(depth):
        # Whether the verdict hits is not known in advance, so use the counts after a miss.
        level = [(*path, rank) for path in level for rank in range(shape.num_children(path, hit=False))]
        found += level[: max(MANY_PATHS - len(found), 0)]
    return found


def checked_tree(said: str, most: int, why: str) -> tuple[Path, ...]:
    """Return the paths in `heads_tree`.

    Raises ConfigError if it is not a valid tree, or has paths deeper than `most`; `why` names the reason for this
    limit.
    """
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
    """Return how many levels each session's tree may have; the correction takes one position."""
    if not sessions:
        return []
    limits: list[int] = sessions[0].trees.limit[[one.place for one in sessions]].tolist()
    return [limit - len(one.token_ids) - 1 for one, limit in zip(sessions, limits, strict=True)]


class DraftingParams:
    """Parameters by session. The same object is returned as long as the session's own parameters stay."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[SamplingParams, Speculation, SamplingParams]] = {}

    def of(self, session: Session) -> SamplingParams:
        """Return the parameters of a session."""
        known = self._known.get(session.session_id)
        if known is None or known[0] is not session.params or known[1] is not session.speculation:
            drafting = drafting_params(session.params, session.speculation)
            known = self._known[session.session_id] = session.params, session.speculation, drafting
        return known[2]

    def forget(self, session_id: int) -> None:
        """Forget a session, known or not."""
        self._known.pop(session_id, None)
