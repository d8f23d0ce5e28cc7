"""The packed rows of one forward pass: rows of many sessions one after the other, described by integer arrays alone.

A row sees the first `ctx_lens[r]` slots of its session's table, then its extras (the slots of its ancestors in the tree,
root to leaf, and its own). That covers prefill chunks (each row one slot of the table more), plain rows and tree nodes
alike. Slots appear in the order of positions, so that sums over them are reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise

import numpy as np
import numpy.typing as npt

from specq.params import SamplingParams
from specq.types import Int32Array, SessionStep

MANY_NODES = 128  # from which on arrays over all sessions are faster than lists session by session


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows for one forward pass; R rows of S sessions, J of which give logits.

    tables       S arrays i32[>= ctx_lens]  slot of each committed position
    block        i32                        all arrays below, one after the other
    token_ids, positions, slots, ctx_lens   i32[R]; slots: where the row's own KV goes
    extra_starts i32[R + 1], extras i32[E]  row r's extras are extras[extra_starts[r] : extra_starts[r + 1]]
    row_starts   i32[S + 1]                 session s has the rows row_starts[s] .. row_starts[s + 1]
    logit_rows   i32[J]                     ascending
    """

    tables: list[Int32Array]
    block: Int32Array
    token_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    ctx_lens: Int32Array
    extra_starts: Int32Array
    extras: Int32Array
    row_starts: Int32Array
    logit_rows: Int32Array

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sessions(self) -> int:
        return len(self.tables)


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where a chain begins: after the committed context, or after a node below it.

    session   rows of one session stand together, and only the first brings its table
    table     i32[>= length]  slots of the context; lineage: those of the node's ancestors and its own, root first
    position  that of the chain's first token
    slots     for the keys and values of the chain's tokens, but the last: depth - 1 of them
    """

    session: int
    table: Int32Array
    length: int
    lineage: Sequence[int]
    position: int
    slots: Sequence[int]
    params: SamplingParams


class RowPacker:
    """Collects rows session by session; `pack` makes the arrays."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._ctx_lens: list[int] = []
        self._extra_starts: list[int] = [0]
        self._extras: list[int] = []
        self._row_starts: list[int] = []
        self._tables: list[Int32Array] = []
        self._logit_rows: list[int] = []

    def add_session(self, table: Int32Array) -> None:
        """Start the rows of a session; the table must hold its chain rows' own slots too."""
        self._row_starts.append(len(self._token_ids))
        self._tables.append(table)

    def add_chain(self, token_ids: Sequence[int], slots: Sequence[int], start: int, judged: bool) -> None:
        """Add consecutive committed tokens from position `start` on; if judged, the last gives logits."""
        positions = range(start, start + len(token_ids))
        self._token_ids.extend(token_ids)
        self._positions.extend(positions)
        self._slots.extend(slots)
        self._ctx_lens.extend(position + 1 for position in positions)
        self._extra_starts.extend([len(self._extras)] * len(token_ids))
        if judged:
            self._logit_rows.append(len(self._token_ids) - 1)

    def add_node(self, token_id: int, slot: int, position: int, ctx_len: int, lineage: Sequence[int]) -> None:
        """Add a judged tree node; lineage: the slots of its ancestors from the root on, its own last."""
        self._logit_rows.append(len(self._token_ids))
        self._token_ids.append(token_id)
        self._positions.append(position)
        self._slots.append(slot)
        self._ctx_lens.append(ctx_len)
        self._extras.extend(lineage)
        self._extra_starts.append(len(self._extras))

    def pack(self) -> PackedRows:
        """Return the rows added so far."""
        lists = (
            self._token_ids,
            self._positions,
            self._slots,
            self._ctx_lens,
            self._extra_starts,
            self._extras,
            [*self._row_starts, len(self._token_ids)],
            self._logit_rows,
        )
        block = np.fromiter(chain.from_iterable(lists), np.int32)
        ends = list(accumulate(map(len, lists), initial=0))
        return PackedRows(self._tables, block, *(block[start:end] for start, end in pairwise(ends)))


def pack_steps(steps: Sequence[SessionStep], slots: Int32Array, tables: list[Int32Array]) -> PackedRows:
    """Pack a step's rows, each session's chain and then its nodes; `slots` i32[rows] in that order, a table a session."""
    pack = _pack_arrays if sum(step.tree.num_nodes for step in steps) >= MANY_NODES else _pack_lists
    return pack(steps, slots, tables)


def _pack_lists(steps: Sequence[SessionStep], slots: Int32Array, tables: list[Int32Array]) -> PackedRows:
    packer = RowPacker()
    own_slots = iter(slots.tolist())
    for step, table in zip(steps, tables, strict=True):
        packer.add_session(table)
        packer.add_chain(step.token_ids.tolist(), list(islice(own_slots, len(step.token_ids))), step.start, step.judged)
        lineages: list[list[int]] = []
        for token_id, parent in zip(step.tree.token_ids.tolist(), step.tree.parents.tolist(), strict=True):
            lineages.append([*(lineages[parent] if parent >= 0 else ()), next(own_slots)])
            position = step.base_len + len(lineages[-1]) - 1
            packer.add_node(token_id, lineages[-1][-1], position, step.base_len, lineages[-1])
    return packer.pack()


def _pack_arrays(steps: Sequence[SessionStep], slots: Int32Array, tables: list[Int32Array]) -> PackedRows:
    num_tokens = np.array([len(step.token_ids) for step in steps])
    num_nodes = np.array([step.tree.num_nodes for step in steps])
    row_starts = np.concatenate([[0], np.cumsum(num_tokens + num_nodes)])
    session = np.repeat(np.arange(len(steps)), num_tokens + num_nodes)
    within = np.arange(row_starts[-1]) - row_starts[session]
    is_node = within >= num_tokens[session]
    bases = np.array([step.base_len for step in steps])
    positions = bases[session] - num_tokens[session] + within
    ctx_lens = np.where(is_node, bases[session], positions + 1)
    num_extras = np.zeros(len(session), np.int64)
    extras, depths = _lineages(steps, num_nodes, slots[is_node])
    positions[is_node] = bases[session[is_node]] + depths - 1
    num_extras[is_node] = depths
    judged = np.array([step.judged for step in steps])
    gives_logits = judged[session] & (within >= num_tokens[session] - 1)
    arrays = (
        np.concatenate([part for step in steps for part in (step.token_ids, step.tree.token_ids)]),
        positions,
        slots,
        ctx_lens,
        np.concatenate([[0], np.cumsum(num_extras)]),
        extras,
        row_starts,
        np.flatnonzero(gives_logits),
    )
    block = np.concatenate(arrays).astype(np.int32)
    ends = list(accumulate(map(len, arrays), initial=0))
    return PackedRows(tables, block, *(block[start:end] for start, end in pairwise(ends)))


def _lineages(
    steps: Sequence[SessionStep], num_nodes: npt.NDArray[np.int64], slots: Int32Array
) -> tuple[Int32Array, npt.NDArray[np.int64]]:
    """Return the slots of each node's ancestors and its own, root first, node after node; and how many they are."""
    firsts = np.cumsum(num_nodes) - num_nodes
    parents = np.concatenate([step.tree.parents for step in steps])
    parents = np.where(parents >= 0, parents + np.repeat(firsts, num_nodes), -1)
    current = np.arange(len(parents))
    generations = []
    while (current >= 0).any():
        generations.append(current)
        current = np.where(current >= 0, parents[current], -1)
    lines = np.stack(generations[::-1], 1)  # [nodes, depth of the deepest], -1 where a line is shorter
    known = lines >= 0
    return slots[lines[known]], known.sum(1)
