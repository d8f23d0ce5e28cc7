"""The operations on the draft trees in C: kernels/trees.c, one call for all sessions.

Inputs and outputs are copied through buffers with known addresses.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array, UInt8Array
from specq.runtime import Buffer, library
from specq.verifier.trees.arrays import MAX_LIVE_NODES, Arrays

SOURCE = Path(__file__).parent / "kernels" / "trees.c"


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the compiled library; None if this machine cannot build it."""
    found = library(SOURCE)
    return None if found is None else with_signatures(found)


def with_signatures(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of a library's functions."""
    pointer, number = ctypes.c_void_p, ctypes.c_long
    found.trees_graft.argtypes = [pointer, number, number, *[pointer] * 6]
    found.trees_graft.restype = number
    found.trees_candidates.argtypes = [pointer, number, pointer, pointer, ctypes.c_double, pointer, pointer]
    found.trees_best_chains.argtypes = [pointer, number, number, *[pointer] * 5]
    found.trees_flatten.argtypes = [pointer, number, *[pointer] * 5]
    found.trees_flatten.restype = number
    found.trees_select.argtypes = [pointer, number, pointer, number, *[pointer] * 5, number, ctypes.c_double, pointer]
    found.trees_select.restype = number
    found.trees_count.argtypes = [pointer, number, *[pointer] * 4, number]
    found.trees_commit.argtypes = [pointer, number, *[pointer] * 4]
    found.trees_live.argtypes = [pointer, number, pointer]
    found.trees_live.restype = number
    found.trees_forget.argtypes = [pointer, number]
    return found


class CompiledTrees:
    """See `specq.verifier.trees.draft_trees.Operations`."""

    def __init__(self, trees: Arrays, kernels: ctypes.CDLL) -> None:
        self._trees, self._kernels = trees, kernels
        self._at = ctypes.addressof(trees.struct)
        self._i64 = [Buffer(np.int64) for _ in range(2)]
        self._i32 = [Buffer(np.int32) for _ in range(4)]
        self._f64 = [Buffer(np.float64) for _ in range(2)]
        self._f32, self._u8 = Buffer(np.float32), Buffer(np.uint8)

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
        num_drafts, size = len(heads), len(token_ids)
        at_heads = self._i64[0].take(heads.reshape(-1), heads.size)
        at_tokens, at_parents = self._i32[0].take(token_ids, size), self._i32[1].take(parent_ids, size)
        at_groups = None if groups is None else self._i32[2].take(groups, size)
        at_scores, at_arrived = self._f64[0].take(scores, size), self._f64[1].take(arrived, num_drafts)
        done: int = self._kernels.trees_graft(
            self._at, first, num_drafts, at_heads, at_tokens, at_parents, at_scores, at_groups, at_arrived
        )
        heads.reshape(-1)[:] = self._i64[0].array[: heads.size]
        return done

    def candidates(self, sessions: npt.ArrayLike, ends: npt.ArrayLike, floor: float) -> tuple[Int64Array, Int32Array]:
        """See `Operations`."""
        count = np.size(sessions)
        firsts, found = self._i64[0].room(count + 1), self._i32[2].room(self._trees.num_nodes)
        at_sessions, at_ends = self._i32[0].take(sessions, count), self._i32[1].take(ends, count)
        self._kernels.trees_candidates(
            self._at, count, at_sessions, at_ends, floor, self._i64[0].address, self._i32[2].address
        )
        return firsts.copy(), found[: firsts[-1]].copy()

    def best_chains(self, firsts: Int64Array, nodes: Int32Array, most: int) -> tuple[Int64Array, Int32Array]:
        """See `Operations`."""
        size = len(nodes)
        at_firsts, at_nodes = self._i64[0].take(firsts, len(firsts)), self._i32[0].take(nodes, size)
        for buffer in (self._i32[1], self._i32[2], self._f64[0]):
            buffer.room(size)
        self._kernels.trees_best_chains(
            self._at, len(firsts) - 1, most, at_firsts, at_nodes,
            self._f64[0].address, self._i32[1].address, self._i32[2].address,
        )  # fmt: skip
        found = self._i64[0].array[: len(firsts)].copy()
        return found, self._i32[0].array[: found[-1]].copy()

    def flatten(self, firsts: Int64Array, nodes: Int32Array) -> tuple[Int32Array, Int32Array, Float32Array]:
        """See `Operations`."""
        size = len(nodes)
        tokens, parents, scores = self._i32[1].room(size), self._i32[2].room(size), self._f32.room(size)
        at_firsts, at_nodes = self._i64[0].take(firsts, len(firsts)), self._i32[0].take(nodes, size)
        wrong = self._kernels.trees_flatten(
            self._at, len(firsts) - 1, at_firsts, at_nodes,
            self._i32[1].address, self._i32[2].address, self._f32.address,
        )  # fmt: skip
        assert wrong < 0, f"node {wrong} of {size} comes before its parent"
        return tokens.copy(), parents.copy(), scores.copy()

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
        count, size = len(sizes), len(token_ids)
        at_sessions, at_sizes = self._i32[0].take(sessions, count), self._i32[1].take(sizes, count)
        at_tokens, at_parents = self._i32[2].take(token_ids, size), self._i32[3].take(parents, size)
        at_scores, at_enough = self._f64[0].take(scores, size), self._f64[1].take(enough, count)
        self._f32.room(size)
        kept: int = self._kernels.trees_select(
            self._at, count, at_sessions, lane_id, at_sizes, at_tokens, at_parents, at_scores, at_enough, rarity, least,
            self._f32.address,
        )  # fmt: skip
        found = self._i32[1].array[:count].copy(), self._i32[2].array[:kept].copy(), self._i32[3].array[:kept].copy()
        return *found, self._f32.array[:kept].copy()

    def count(
        self,
        sessions: npt.ArrayLike,
        sizes: npt.ArrayLike,
        nodes: Int32Array,
        is_accepted: UInt8Array,
        min_accept_prob: int,
    ) -> None:
        """See `Operations`."""
        count = np.size(sessions)
        at_sessions, at_sizes = self._i32[0].take(sessions, count), self._i32[1].take(sizes, count)
        at_nodes, at_accepted = self._i32[2].take(nodes, len(nodes)), self._u8.take(is_accepted, len(nodes))
        self._kernels.trees_count(self._at, count, at_sessions, at_sizes, at_nodes, at_accepted, min_accept_prob)

    def commit(
        self, sessions: npt.ArrayLike, sizes: npt.ArrayLike, token_ids: Int32Array, num_verified: npt.ArrayLike
    ) -> None:
        """See `Operations`."""
        count = np.size(sessions)
        at_sessions, at_sizes = self._i32[0].take(sessions, count), self._i32[1].take(sizes, count)
        at_tokens = self._i32[2].take(token_ids, len(token_ids))
        at_verified = self._i32[3].take(num_verified, count)
        self._kernels.trees_commit(self._at, count, at_sessions, at_sizes, at_tokens, at_verified)

    def live(self, session: int) -> list[int]:
        """See `Operations`."""
        found = self._i32[0].room(MAX_LIVE_NODES)
        count = self._kernels.trees_live(self._at, session, self._i32[0].address)
        nodes: list[int] = found[:count].tolist()
        return nodes

    def forget(self, session: int) -> None:
        """See `Operations`."""
        self._kernels.trees_forget(self._at, session)
