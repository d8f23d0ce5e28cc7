"""The columns of the draft trees: NumPy arrays that grow by doubling; and the operations on them in C.

Python sees them as memoryviews, and C sees them as one struct.

To add a column, name it in a table, and at the same place in `Trees` of kernels/trees.h. If C does not need it, name it
in `STATES` only.

The operations in C are in kernels/trees.c, one call for all sessions. Inputs and outputs are copied through buffers
with known addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array, UInt8Array
from specq.runtime import Buffer, library
from specq.verification import NUM_BINS, ROW

MAX_LIVE_NODES = 512  # of one session; further nodes are dropped
MAX_LANES = 8  # of a session
MAX_TABLE_SIZE = 4096  # ids in a lane's node table; a power of two
MAX_END_IDS = 8  # of a session whose end follows from the arrays alone
WINDOW = 1024  # number of newest committed tokens for aligning late drafts; a power of two

FIRST_OWN_LANE, NUM_OWN_LANES = 240, 16  # for the sources of the verifier

NONE = -1
CUT = -1  # in a node table: CUT is a removed node; a lower value is COMMITTED - the length that a committed node ends
COMMITTED = -2

COUNTS = "drafted", "stale", "orphans", "hits", "misses", "drafted_rounds", "leaves", "depths", "min_accept_probs"

# Of nodes. `mark` is scratch. `free_nodes` is a stack of the places without a node.
NODES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "token": ("i4", ()),
    "parent": ("i4", ()),  # NONE: a child of the committed context
    "first_child": ("i4", ()),
    "next_sibling": ("i4", ()),  # siblings in order of arrival
    "position": ("i4", ()),  # the position that its token would take
    "node_session": ("i4", ()),  # NONE: no node at this place
    "node_lane": ("i4", ()),
    "node_id": ("i4", ()),
    "first_ref": ("i4", ()),  # the first place in the node tables that names this node
    "group": ("i4", ()),  # the draft distribution from which it was drawn; NONE: a point mass
    "rank": ("i4", ()),  # its place in the order of draws in its sibling group
    "depends_on": ("i4", ()),
    "mark": ("i4", ()),
    "free_nodes": ("i4", ()),
    "is_measured": ("u1", ()),
    "score": ("f8", ()),  # log-probability of acceptance given the parent
    "predicted": ("f8", ()),  # the same before acceptance statistics raised it
    "arrived": ("f8", ()),
    "reach_prob": ("f8", ()),  # cumulative acceptance probability
}
SESSIONS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "length": ("i4", ()),  # committed tokens; NONE: no session at this place
    "num_live": ("i4", ()),
    "first_root": ("i4", ()),
    "num_lanes": ("i4", ()),
    "session_lanes": ("i4", (MAX_LANES,)),  # in order of arrival
    "drafted_at": ("i4", ()),  # the newest position that a draft named
    "beats_waited": ("i4", ()),  # heartbeats, since the last draft, in which the session waited for one
    "recent": ("i4", (WINDOW,)),  # the token at position i is at i % WINDOW
    "takes_distributions": ("u1", ()),
    "counts": ("i8", (len(COUNTS),)),
    "verified_at": ("i4", (MAX_LIVE_NODES, 2)),  # by depth: verified and accepted nodes
    "num_declined": ("i4", (NUM_OWN_LANES,)),  # by own lane: drafts without a likely node since the last trial of one
    "free_sessions": ("i4", ()),
}
# Further states of sessions, which kernels/ does not use. `specq.verifier.sessions.session` sets them.
STATES: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
    "session_id": ("i8", ()),
    "epoch": ("i8", ()),
    "kv_len": ("i4", ()),
    "limit": ("i4", ()),
    "journaled": ("i4", ()),
    "last_token": ("i4", ()),
    "end_ids": ("i4", (MAX_END_IDS,)),  # tokens that end the text; other places are NONE
    "num_scratch": ("i4", ()),
    "longest_chain": ("i4", ()),  # nodes of the longest chain that its job accepts; 0: no chains
    "has_extras": ("u1", ()),  # its steps may need a history, scratch rows or draft distributions
    "is_open": ("u1", ()),  # in the engine
    "has_ended": ("u1", ()),
    "ends_by_text": ("u1", ()),  # `Session.up_to_end` finds the end, for one session at a time
    "explains": ("u1", ()),  # its verdicts report what was verified
    "mode": ("u1", ()),  # its place among MODES
    "cached_at": (
        "i4",
        (),
    ),  # the base length of its first verdict, if that verdict reports the cached part of the prompt; else NONE
    "traits": ("u1", ()),
    "needs_history": ("u1", ()),  # its next token may depend on the last one, as the host knows it
    "awaits_grammar": ("u1", ()),  # its grammar is not built yet, so it takes part in no step
    "sampling": (ROW, ()),
}
LANES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "lane_id": ("i4", ()),
    "newest_id": ("i8", ()),  # the newest node id that arrived
    "first_after_loss": ("i8", ()),  # the first node id after the last lost or dropped ids
    "num_refs": ("i4", ()),  # ids in the table that name a live node
    "table_ids": ("i4", (MAX_TABLE_SIZE,)),  # node id i is at i % MAX_TABLE_SIZE
    "table_nodes": ("i4", (MAX_TABLE_SIZE,)),  # its node, CUT, or COMMITTED - length
    "table_next": ("i4", (MAX_TABLE_SIZE,)),  # the next place, in all tables, with the same live node
    "trials": ("f8", (NUM_BINS,)),
    "accepted": ("f8", (NUM_BINS,)),
    "free_lanes": ("i4", ()),
}
GROUPS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "group_size": ("i4", ()),  # live nodes drawn from it
    "free_groups": ("i4", ()),
}
ALONE: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "sampled_trials": ("f8", (NUM_BINS,)),  # the calibration of sampled nodes, in all sessions
    "sampled_accepted": ("f8", (NUM_BINS,)),
}
COLUMNS = {"nodes": NODES, "sessions": {**SESSIONS, **STATES}, "lanes": LANES, "groups": GROUPS}
WHICH = {kind: i for i, kind in enumerate(COLUMNS)}  # in `room` and `num_free`
STACKS = {"nodes": "free_nodes", "sessions": "free_sessions", "lanes": "free_lanes", "groups": "free_groups"}


class _Struct(ctypes.Structure):
    """`Trees` of kernels/trees.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for columns in (NODES, SESSIONS, LANES, GROUPS, ALONE) for name in columns),
        ("room", ctypes.c_void_p),
        ("num_free", ctypes.c_void_p),
    ]


class Arrays:
    """All columns; each name of the tables above is an attribute.

    room, num_free  i64[4]: the room for nodes, sessions, lanes and groups, and the number of free places.
    views           the same columns as memoryviews, whose elements are Python numbers.
    struct          the same columns for C.
    """

    def __init__(self) -> None:
        self.room, self.num_free = np.zeros(len(COLUMNS), np.int64), np.zeros(len(COLUMNS), np.int64)
        self.views: Any = type("Views", (), {"room": self.room.data, "num_free": self.num_free.data})
        self.struct = _Struct(room=self.room.ctypes.data, num_free=self.num_free.ctypes.data)
        for columns in COLUMNS.values():
            for name, (dtype, shape) in columns.items():
                self._set(name, np.zeros((0, *shape), dtype))
        for name, (dtype, shape) in ALONE.items():
            self._set(name, np.zeros(shape, dtype))
        for kind, room in (("nodes", 64), ("sessions", 4), ("lanes", 4), ("groups", 4)):
            self._grow_to(kind, room)

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        raise AttributeError(name)

    def _set(self, name: str, column: npt.NDArray[Any]) -> None:
        setattr(self, name, column)
        setattr(self.views, name, column.data)
        if name not in STATES:
            setattr(self.struct, name, column.ctypes.data)

    @property
    def num_nodes(self) -> int:
        return int(self.views.room[0] - self.views.num_free[0])

    def make_room(self, kind: str, count: int) -> None:
        """Grow until this many places of a kind are free."""
        which = WHICH[kind]
        room = int(self.room[which])
        missing = count - int(self.num_free[which])
        if missing > 0:
            self._grow_to(kind, room * 2 ** int(np.ceil(np.log2((room + missing) / room))))

    def _grow_to(self, kind: str, room: int) -> None:
        which, stack = WHICH[kind], STACKS[kind]
        before, num_free = int(self.room[which]), int(self.num_free[which])
        free = np.concatenate([np.arange(room - 1, before - 1, -1), getattr(self, stack)[:num_free]])
        for name, (dtype, shape) in COLUMNS[kind].items():
            column = np.zeros((room, *shape), dtype)
            column[:before] = getattr(self, name)
            self._set(name, column)
        getattr(self, stack)[: len(free)] = free
        self.room[which], self.num_free[which] = room, len(free)
        if kind == "nodes":
            self.node_session[before:] = NONE
        elif kind == "sessions":
            self.length[before:] = NONE

    def take(self, kind: str) -> int:
        """Take a free place of a kind and return it."""
        self.make_room(kind, 1)
        which = WHICH[kind]
        self.num_free[which] -= 1
        return int(getattr(self, STACKS[kind])[self.num_free[which]])

    def give(self, kind: str, place: int) -> None:
        """Free a place of a kind."""
        which = WHICH[kind]
        getattr(self, STACKS[kind])[self.num_free[which]] = place
        self.num_free[which] += 1


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
