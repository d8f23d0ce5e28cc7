"""The packed rows of one forward pass: rows of many sessions in sequence, as integer arrays.

A row sees the first `ctx_lens[r]` slots of its session's table, then its extras. The extras are the slots of its tree
ancestors, root to leaf, and its own. That covers prefill chunks, plain rows and tree nodes. In a prefill chunk each row
sees one more slot of the table. Slots appear in the order of positions, so that sums over them are reproducible.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specq.engines.native.compiler import kernels
from specq.engines.native.slot_tables import SlotTables
from specq.protocol import NO_SCRATCH, Int32Array, Int64Array, IntpArray, SamplingParams, SessionStep, Tree
from specq.verification import StepBatch, ends_of, places_in_runs

ROW_NUMBERS: Int32Array = np.arange(1025, dtype=np.int32)


# The arrays of `PackedRows.block`, in order.
COLUMNS = ("token_ids", "positions", "slots", "ctx_lens", "extra_starts", "extras", "row_starts", "logit_rows")


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows for one forward pass: R rows of S sessions. J of the rows give logits.

    - tables: S arrays i32[>= ctx_lens], slot of each committed position.
    - block: i32, all arrays below in sequence.
    - token_ids, positions, slots, ctx_lens: i32[R]; slots: where the row's own KV goes.
    - extra_starts: i32[R + 1]; extras: i32[E]. The extras of row r are extras[extra_starts[r] : extra_starts[r + 1]].
    - row_starts: i32[S + 1]. Session s has the rows row_starts[s] .. row_starts[s + 1].
    - logit_rows: i32[J], ascending within a session.
    """

    tables: Sequence[Int32Array]
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


class LinePlaces(NamedTuple):
    """Where the slots of lines stand in a block, i64[n] each.

    Each entry is one node. `rows` is the packed row of its line, `levels` its level, `starts` its place in the block.
    """

    starts: Int64Array
    rows: Int64Array
    levels: Int64Array

    @classmethod
    def of(cls, rows: IntpArray, starts: IntpArray, lengths: IntpArray) -> LinePlaces:
        """Return the places of whole lines, from each line's start and number of nodes."""
        levels = places_in_runs(lengths)
        return cls(starts.repeat(lengths) + levels, rows.repeat(lengths), levels)


@dataclass(frozen=True, slots=True)
class RowTap:
    """Hidden states that a forward pass returns, for packed rows i32[n]. It has at least one layer, as in `Tap`."""

    layers: tuple[int, ...]
    rows: Int32Array


@dataclass(frozen=True, slots=True)
class ChainStarts:
    """Where chains begin: after committed contexts, or after nodes below them. A session's chains are adjacent.

    - tables: of S sessions, i32[>= length] each, slots of the context.
    - row_starts: i32[S + 1]. Session s has the chains row_starts[s] .. row_starts[s + 1].
    - lengths: i32[chains], length of the context.
    - lineages: for each chain, the slots of the node's ancestors and its own, root first. () if all begin after
      contexts.
    - positions: i32[chains], position of the chain's first token.
    - slots: i32[chains, depth - 1], for the keys and values of the chain's tokens except the last.
    - params: sampling parameters of each chain.
    """

    tables: Sequence[Int32Array]
    row_starts: Int32Array
    lengths: Int32Array
    lineages: Sequence[Sequence[int]]
    positions: Int32Array
    slots: Int32Array
    params: Sequence[SamplingParams]

    def __len__(self) -> int:
        return len(self.positions)


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
        """Start the rows of a session. The table must also hold the slots of its chain rows."""
        self._row_starts.append(len(self._token_ids))
        self._tables.append(table)

    def add_chain(self, token_ids: Sequence[int], slots: Sequence[int], start: int, judged: bool) -> None:
        """Add consecutive committed tokens from position `start` on. If judged, the last one gives logits."""
        positions = range(start, start + len(token_ids))
        self._token_ids.extend(token_ids)
        self._positions.extend(positions)
        self._slots.extend(slots)
        self._ctx_lens.extend(position + 1 for position in positions)
        self._extra_starts.extend([len(self._extras)] * len(token_ids))
        if judged:
            self._logit_rows.append(len(self._token_ids) - 1)

    def add_node(
        self, token_id: int, slot: int, position: int, ctx_len: int, lineage: Sequence[int], *, judged: bool = True
    ) -> None:
        """Add a tree node. If judged, it gives logits.

        lineage: the slots of its ancestors from the root on, its own last.
        """
        if judged:
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


def pack_nodes(
    starts: ChainStarts, token_ids: Int32Array, slots: Int32Array, positions: Int32Array, own: Int32Array
) -> PackedRows:
    """Pack one row for each chain: a node. Its extras are its lineage, then `own` i32[chains, any]."""
    count, width = own.shape
    extra_starts, extras = width * np.arange(count + 1), own.reshape(-1)
    if starts.lineages:
        extra_starts += np.cumsum([0, *map(len, starts.lineages)])
        lists = zip(starts.lineages, own.tolist(), strict=True)
        extras = np.fromiter(chain.from_iterable(chain(*both) for both in lists), np.int32)
    columns = token_ids, positions, slots, starts.lengths
    return _packed(starts.tables, *columns, extra_starts, extras, starts.row_starts, np.arange(count))


def pack_tokens(
    tables: Sequence[Int32Array],
    starts: IntpArray,
    counts: IntpArray,
    token_ids: Int32Array,
    slots: Int32Array,
    *,
    judged: bool = True,
) -> PackedRows:
    """Pack tokens of contexts: `counts` tokens of each session from position `starts` on.

    If judged, the last token of each session gives logits.
    """
    ends = ends_of(counts)
    positions = (starts - ends + counts).repeat(counts) + np.arange(len(token_ids))
    no_extras = np.zeros(len(token_ids) + 1)
    lasts = ends - 1 if judged else ends[:0]
    row_starts = np.concatenate([[0], ends])
    return _packed(tables, token_ids, positions, slots, positions + 1, no_extras, no_extras[:0], row_starts, lasts)


def _packed(tables: Sequence[Int32Array], *columns: npt.NDArray[Any]) -> PackedRows:
    """Return rows of these columns, in the order of `PackedRows`."""
    block = np.concatenate(columns, dtype=np.int32, casting="unsafe")
    ends = list(accumulate(map(len, columns), initial=0))
    return PackedRows(tables, block, *(block[start:end] for start, end in pairwise(ends)))


def pack_steps(steps: Sequence[SessionStep], slots: Int32Array, tables: Sequence[Int32Array]) -> PackedRows:
    """Pack a step's rows: each session's chain, its nodes and its scratch rows.

    `slots`, i32[rows], are in that order. There is one table per session. In `logit_rows`, scratch rows come behind the
    judged ones, and scored rows last.
    """
    batch = StepBatch.of(steps)
    if batch.has_scratch:
        rows = _pack(StepBatch.of([_grown(step) for step in batch]), slots, tables)
        _set_scratch_apart(batch, rows)
    else:
        rows = _pack_plain(batch, slots, tables) if batch.is_plain else _pack(batch, slots, tables)
    return _with_scored(batch, rows) if batch.extras else rows


def _with_scored(batch: StepBatch, rows: PackedRows) -> PackedRows:
    """Return the rows with logits of the scored ones, too."""
    if not (scored := batch.scored):
        return rows
    firsts = batch.first_rows
    more = [firsts[place] + np.arange(own.num_rows) for place, own in scored.items()]
    columns = (getattr(rows, name) for name in COLUMNS[:-1])
    return _packed(rows.tables, *columns, np.concatenate([rows.logit_rows, *more]))


def _pack_plain(batch: StepBatch, slots: Int32Array, tables: Sequence[Int32Array]) -> PackedRows:
    """Pack a step with one token per session, all judged."""
    count = len(slots)
    block = np.empty(7 * count + 2, np.int32)
    columns, rest = block[: 4 * count].reshape(4, count), block[4 * count :]
    columns[0], columns[1], columns[2] = batch.token_ids, batch.starts, slots
    np.add(batch.starts, 1, out=columns[3])
    starts, rest = rest[: count + 1], rest[count + 1 :]
    starts[:] = 0
    rest[: count + 1] = ROW_NUMBERS[: count + 1] if count < len(ROW_NUMBERS) else np.arange(count + 1)
    rest[count + 1 :] = rest[:count]
    token_ids, positions, own_slots, ctx_lens = columns
    logit_rows = rest[count + 1 :]
    return PackedRows(
        tables, block, token_ids, positions, own_slots, ctx_lens, starts, rest[:0], rest[: count + 1], logit_rows
    )


def _grown(step: SessionStep) -> SessionStep:
    """Return the step with its scratch rows appended to the nodes of its tree. Their parents continue the numbering."""
    tree, scratch = step.tree, step.scratch
    token_ids = np.concatenate([tree.token_ids, scratch.token_ids])
    parents = np.concatenate([tree.parents, scratch.parents])
    return replace(step, tree=Tree(token_ids, parents, tree.scores), scratch=NO_SCRATCH)


def _set_scratch_apart(steps: Sequence[SessionStep], rows: PackedRows) -> None:
    """Give scratch rows, packed as nodes, their own positions. Move them to the end of `logit_rows`."""
    is_scratch = np.zeros(rows.num_rows, np.bool_)
    for end, step in zip(rows.row_starts[1:].tolist(), steps, strict=True):
        is_scratch[end - step.scratch.num_rows : end] = True
    rows.positions[is_scratch] = np.concatenate([step.scratch.positions for step in steps])
    of_scratch = is_scratch[rows.logit_rows]
    rows.logit_rows[:] = np.concatenate([rows.logit_rows[~of_scratch], rows.logit_rows[of_scratch]])


def _pack(batch: StepBatch, slots: Int32Array, tables: Sequence[Int32Array]) -> PackedRows:
    library = kernels()
    return _pack_lists(batch, slots, tables) if library is None else _pack_native(library, batch, slots, tables)


def _pack_lists(steps: Sequence[SessionStep], slots: Int32Array, tables: Sequence[Int32Array]) -> PackedRows:
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


class _Steps(ctypes.Structure):
    _fields_ = (
        ("num_sessions", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("num_tokens", "num_nodes", "starts", "judged")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "slots", "parents")),
    )


def _pack_native(library: ctypes.CDLL, batch: StepBatch, slots: Int32Array, tables: Sequence[Int32Array]) -> PackedRows:
    """Pack the rows in one call of C (kernels/rows.h)."""
    counts = np.empty((4, len(batch)), np.int32)
    counts[0], counts[1], counts[2], counts[3] = batch.num_tokens, batch.num_nodes, batch.starts, batch.is_judged
    token_ids, parents = batch.token_ids, batch.parents
    most_extras = int(batch.num_nodes.dot(batch.num_nodes + 1)) // 2
    num_sessions, num_rows = len(batch), len(slots)
    block = np.empty(6 * num_rows + most_extras + num_sessions + 2, np.int32)
    sizes = (ctypes.c_int32 * 3)(num_rows)
    first = address(counts)
    described = _Steps(
        num_sessions,
        *range(first, first + 16 * num_sessions, 4 * num_sessions),
        *map(address, (token_ids, slots, parents)),
    )
    length = library.specq_pack_rows(
        ctypes.byref(described), sizes, ctypes.c_void_p(address(block)), ctypes.c_int64(len(block))
    )
    assert length >= 0
    _, num_extras, num_logits = sizes
    lengths = (*(num_rows,) * 4, num_rows + 1, num_extras, num_sessions + 1, num_logits)
    ends = list(accumulate(lengths, initial=0))
    return PackedRows(tables, block[:length], *(block[start:end] for start, end in pairwise(ends)))


def table_addresses(tables: Sequence[Int32Array]) -> npt.NDArray[np.int64]:
    """Return where tables begin in memory, i64[sessions]. The caller must keep the tables alive."""
    if isinstance(tables, SlotTables):
        return tables.addresses
    return np.array([address(table) for table in tables], np.int64)


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array's data. This takes a third of the time of `array.ctypes.data`."""
    found: int = array.__array_interface__["data"][0]
    return found
