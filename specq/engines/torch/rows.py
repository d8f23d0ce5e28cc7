"""The packed rows of one forward pass: rows of many sessions one after the other, described by integer arrays alone.

A row sees the first `ctx_lens[r]` slots of its session's table, then its extras (the slots of its ancestors in the tree,
root to leaf, and its own). That covers prefill chunks (each row one slot of the table more), plain rows and tree nodes
alike. Slots appear in the order of positions, so that sums over them are reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from specq.types import Int32Array


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
