"""Lays out a forward pass's integers for the fused path: one int32 block, copied to the device at once. No torch.

Attention is cut into work items of a few rows of one session against a part of one list of slots, so that long contexts
are read by many programs at once, and rows of a session share what they read:

    prefix item   a block of at most `rows_per_block` rows against `chunk` slots of the session's table
    nodes item    a run of rows each of which is the child of the one before, against the last one's extras: of those a
                  row sees as many as it has extras itself

Each item gives every one of its rows a partial result. A row's partials lie at equal distances: `spans` says where. Where
one prefix item and one nodes item make up all that a session sees, they are one item, whose result needs no combining.

The block's parts, for a padded number of rows R (padding: token 0, slot -1, no partials):

    token_ids, positions, slots i32[R]; visible i32[2, R]: slots of the table, and of its own extras, that a row sees
    spans i32[R, 3]: first partial, distance, number of partials; 0 partials: the result is written at once
    logit_rows i32[R]; num_items i32[4], of which the first counts; items i32[max_items, 8]; lists i32[any]

An item: first row, number of rows, start and length in lists, position of the list's first slot, first partial (-1: the
result is written at once), where in the list the nodes begin, 0. The lists are, for each session, its table and then what
its runs see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import numpy as np

from specq.engines.torch.rows import PackedRows
from specq.types import Int32Array

CHUNK = 64  # slots; a prefix item has a multiple of it
ITEM = 8  # integers
LENGTH = 3  # where in an item its list's length stands


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the parts of a block lie; see the module.

    num_rows        R, padded
    rows_per_block  rows of a session that one item may hold
    num_chunks      about how many prefix items there should be, to fill the device
    joins           whether nodes may join a prefix item, and results be written at once
    """

    num_rows: int
    rows_per_block: int
    num_chunks: int
    joins: bool = True

    @property
    def max_items(self) -> int:
        return 2 * self.num_rows + self.num_chunks

    @property
    def max_partials(self) -> int:
        """Rows of partial results that any step may need."""
        return 2 * self.num_rows + self.rows_per_block * self.num_chunks

    def starts(self) -> dict[str, int]:
        """Return each part's offset in the block, in order; the same dict at every call."""
        return _starts(self)


@cache
def _starts(layout: BlockLayout) -> dict[str, int]:
    rows = layout.num_rows
    lengths = {"token_ids": rows, "positions": rows, "slots": rows, "visible": 2 * rows, "spans": 3 * rows}
    lengths |= {"logit_rows": rows, "num_items": 4, "items": ITEM * layout.max_items, "lists": 0}
    return dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))


def max_list_length(rows: PackedRows) -> int:
    """Number of slots that the lists of a step may have."""
    return int(np.maximum.reduceat(rows.ctx_lens, rows.row_starts[:-1]).sum()) + len(rows.extras)


def lay_out(rows: PackedRows, layout: BlockLayout, block: Int32Array) -> int:
    """Fill a block (i32, long enough) for these rows; return how much of it is used."""
    starts = layout.starts()
    num_rows, num_padded = rows.num_rows, layout.num_rows
    if num_rows < num_padded:
        block[: starts["logit_rows"]] = 0
        block[starts["slots"] + num_rows : starts["visible"]] = -1
    plan = _Plan(rows, layout)
    after_visible = starts["visible"] + num_padded
    for start, values in (
        (starts["token_ids"], rows.token_ids),
        (starts["positions"], rows.positions),
        (starts["slots"], rows.slots),
        (starts["visible"], rows.ctx_lens),
        (after_visible, rows.extra_starts[1:] - rows.extra_starts[:-1]),
        (starts["spans"], plan.spans),
        (starts["logit_rows"], rows.logit_rows),
        (starts["items"], plan.items),
    ):
        block[start : start + len(values)] = values
    block[starts["num_items"]] = len(plan.items) // ITEM
    end = starts["lists"] + plan.list_length
    np.concatenate(plan.lists, out=block[starts["lists"] : end])
    return end


class _Plan:
    """Items (8 integers each, prefix items first), spans (3 integers a row) and the lists, one after the other.

    Plain lists: a step has some hundred items at most, and NumPy needs some microseconds for anything.
    """

    def __init__(self, rows: PackedRows, layout: BlockLayout) -> None:
        self._rows, self._layout = rows, layout
        self._slots, self._extras = rows.slots.tolist(), rows.extras.tolist()
        self._extra_starts = rows.extra_starts.tolist()
        self.spans: list[int] = []
        self.lists: list[Int32Array] = []
        self.list_length = 0
        self._prefixes: list[int] = []
        self._nodes: list[int] = []
        self._num_partials = 0
        blocks = self._blocks()
        total = sum(seen for session in blocks for _, _, seen in session)
        chunk = CHUNK * max(1, -(-total // (layout.num_chunks * CHUNK)))
        for table, session in zip(rows.tables, blocks, strict=True):
            self._add_session(table, session, chunk)
        self.items = self._prefixes + self._nodes
        assert len(self.items) <= ITEM * layout.max_items

    def _blocks(self) -> list[list[tuple[int, int, int]]]:
        """Return, for each session, its blocks: (first row, end, slots of the table that they see)."""
        ctx_lens, most = self._rows.ctx_lens.tolist(), self._layout.rows_per_block
        blocks = []
        for first, end in pairwise(self._rows.row_starts.tolist()):
            cuts = [*range(first, end, most), end]
            blocks.append([(start, stop, max(ctx_lens[start:stop])) for start, stop in pairwise(cuts)])
        return blocks

    def _add_session(self, table: Int32Array, blocks: list[tuple[int, int, int]], chunk: int) -> None:
        context = max(seen for _, _, seen in blocks)
        self.lists.append(table[:context])
        table_start = self.list_length
        self.list_length += context
        for first, end, seen in blocks:
            runs = self._runs(first, end)
            if self._layout.joins and len(blocks) == 1 and seen <= chunk and len(runs) <= 1:
                self._add_joined(first, end - first, table_start, seen, runs)
            else:
                self._add_block(first, end - first, table_start, seen, runs, chunk)

    def _add_joined(self, first: int, size: int, start: int, seen: int, runs: list[tuple[int, int]]) -> None:
        length = seen + (self._add_list(runs[0][1] - 1)[1] if runs else 0)
        self._prefixes += (first, size, start, length, 0, -1, seen, 0)
        self.spans += (0, 0, 0) * size

    def _add_block(self, first: int, size: int, start: int, seen: int, runs: list[tuple[int, int]], chunk: int) -> None:
        partial = self._num_partials
        num_parts = -(-seen // chunk)
        for part in range(num_parts):
            position = part * chunk
            length = min(chunk, seen - position)
            self._prefixes += (first, size, start + position, length, position, partial + part * size, length, 0)
        for run_first, run_end in runs:
            run_start, length = self._add_list(run_end - 1)
            own = partial + num_parts * size + run_first - first
            self._nodes += (run_first, run_end - run_first, run_start, length, 0, own, 0, 0)
        extra_starts = self._extra_starts
        for row in range(first, first + size):
            has_extras = extra_starts[row + 1] > extra_starts[row]
            self.spans += (partial + row - first, size, num_parts + has_extras)
        self._num_partials += (num_parts + bool(runs)) * size

    def _add_list(self, row: int) -> tuple[int, int]:
        """Add a row's extras to the lists; return where they begin, and their number."""
        first, end = self._extra_starts[row], self._extra_starts[row + 1]
        self.lists.append(self._rows.extras[first:end])
        self.list_length += end - first
        return self.list_length - end + first, end - first

    def _runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return (first row, end) of each run: rows that have extras, each row the child of the one before."""
        starts, extras, slots = self._extra_starts, self._extras, self._slots
        runs: list[tuple[int, int]] = []
        if starts[first] == starts[end]:
            return runs
        opened, before = -1, 0
        for row in range(first, end):
            count = starts[row + 1] - starts[row]
            goes_on = opened >= 0 and count == before + 1 and extras[starts[row + 1] - 2] == slots[row - 1]
            if opened >= 0 and not goes_on:
                runs.append((opened, row))
                opened = -1
            if count and opened < 0:
                opened = row
            before = count
        if opened >= 0:
            runs.append((opened, end))
        return runs
