"""The operations on the draft trees in plain Python.

They run without a C compiler. They are also the reference for tests of the C kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array, UInt8Array
from specq.verifier.trees import reference_choice, reference_commit, reference_graft
from specq.verifier.trees.arrays import NONE, Arrays


class ReferenceTrees:
    """See `specq.verifier.trees.draft_trees.Operations`."""

    def __init__(self, trees: Arrays) -> None:
        self._trees = trees

    def graft(
        self,
        first: int,
        heads: Int64Array,
        token_ids: Int32Array,
        parent_ids: Int32Array,
        scores: npt.NDArray[np.floating],
        groups: Int32Array | None,
        arrived: npt.ArrayLike,
    ) -> int:
        """See `reference_graft.graft`."""
        return reference_graft.graft(
            self._trees, first, heads, token_ids, parent_ids, scores, groups, np.broadcast_to(arrived, len(heads))
        )

    def candidates(self, sessions: npt.ArrayLike, ends: npt.ArrayLike, floor: float) -> tuple[Int64Array, Int32Array]:
        """See `Operations`."""
        of_each = zip(_numbers(sessions), _numbers(ends), strict=True)
        return _joined([reference_choice.candidates(self._trees, session, end, floor) for session, end in of_each])

    def best_chains(self, firsts: Int64Array, nodes: Int32Array, most: int) -> tuple[Int64Array, Int32Array]:
        """See `Operations`."""
        return _joined(_of_each(firsts, nodes, lambda own: reference_choice.best_chain(self._trees.views, own, most)))

    def flatten(self, firsts: Int64Array, nodes: Int32Array) -> tuple[Int32Array, Int32Array, Float32Array]:
        """See `Operations`."""
        parents = _of_each(firsts, nodes, lambda own: reference_choice.parents_within(self._trees, own))
        return self._trees.token[nodes], _joined(parents)[1], self._trees.score[nodes].astype(np.float32)

    def select(
        self,
        sessions: npt.ArrayLike,
        lane_id: int,
        sizes: Int32Array,
        token_ids: Int32Array,
        parents: Int32Array,
        scores: Float64Array,
        enough: npt.ArrayLike,
        *,
        rarity: int,
        least: float,
    ) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array]:
        """See `Operations`."""
        ends = np.cumsum(sizes).tolist()
        of_each = zip(
            _numbers(sessions), ends, sizes.tolist(), _numbers(np.broadcast_to(enough, len(sizes))), strict=True
        )
        kept, kept_parents, kept_sizes = list[int](), list[int](), list[int]()
        for session, end, size, promise in of_each:
            own = slice(end - size, end)
            found = reference_choice.select(
                self._trees, session, lane_id, parents[own].tolist(), scores[own].tolist(), promise, rarity, least
            )
            places = {node: place for place, node in enumerate(found)}
            kept_parents += [places.get(parent, NONE) for parent in parents[own][found].tolist()]
            kept += [own.start + node for node in found]
            kept_sizes.append(len(found))
        chosen = np.array(kept, np.intp)
        columns = np.array(kept_sizes, np.int32), token_ids[chosen], np.array(kept_parents, np.int32)
        return *columns, scores[chosen].astype(np.float32)

    def count(
        self,
        sessions: npt.ArrayLike,
        sizes: npt.ArrayLike,
        nodes: Int32Array,
        is_accepted: UInt8Array,
        min_accept_prob: int,
    ) -> None:
        """See `Operations`."""
        reference_commit.count(self._trees, _numbers(sessions), _numbers(sizes), nodes, is_accepted, min_accept_prob)

    def commit(
        self, sessions: npt.ArrayLike, sizes: npt.ArrayLike, token_ids: Int32Array, num_verified: npt.ArrayLike
    ) -> None:
        """See `Operations`."""
        reference_commit.commit(self._trees, _numbers(sessions), _numbers(sizes), token_ids, _numbers(num_verified))

    def live(self, session: int) -> list[int]:
        """See `Operations`."""
        return reference_choice.live(self._trees, session)

    def forget(self, session: int) -> None:
        """See `Operations`."""
        reference_commit.forget(self._trees, session)


def _numbers(values: npt.ArrayLike) -> list[int]:
    found: list[int] = np.asarray(values).tolist()
    return found


def _of_each(firsts: Int64Array, nodes: Int32Array, act: Callable[[list[int]], list[int]]) -> list[list[int]]:
    bounds = firsts.tolist()
    return [act(nodes[first:end].tolist()) for first, end in pairwise(bounds)]


def _joined(of_each: Sequence[Sequence[int]]) -> tuple[Int64Array, Int32Array]:
    """Return where each session's nodes begin, i64[sessions + 1], and all nodes, i32[n]."""
    firsts = np.cumsum([0, *map(len, of_each)], dtype=np.int64)
    return firsts, np.array([node for own in of_each for node in own], np.int32)
