"""Lay out a forward pass's integers for the fused path, as one int32 block. No torch.

The block is copied to the device at once. A row sees a list of slots: its context, then its extras. A slot's position
is its place in this list. It does not matter where the KV lies.

Attention of a row is one sum with a fixed order. So its bits depend on the row's list alone, not on other rows or on
the load. Positions are divided into pieces, which begin at the same positions for all rows (`piece_size`). Each piece
gives a partial result. A row's result is the fold of its pieces from the first to the last (`gpu_kernels.attention`).

Work is divided into items, which many programs compute in parallel. An item is a few rows of one session against some
positions. The load decides how many positions the first item of a list has. It cannot change the order of the sum:

- An item from position 0 has one or more pieces, and folds them. If it has all positions, it writes the result.
  Otherwise it gives each row one partial.
- Any other item has one piece, and gives each row one partial.

A run is consecutive rows of a session that see the same slots at the same positions, each row at least as many as the
row before. Only one list is needed, that of the last row. Examples are a prompt's chunk, and a branch of a tree. A
block is at most `rows_per_block` rows of a session. If it is one run, its items cover the list of the run. Otherwise
the rows share the items of a prefix, which ends where a piece begins. The next piece may have slots of the context and
of a branch. So each run has its own item from there on.

The block's parts, for a padded number of rows R (padding: token 0, slot -1, length 0, no partials):

- token_ids, positions, slots: i32[R].
- lengths: i32[R], how many positions a row sees.
- spans: i32[R, 2], first partial, number of partials, in the order of positions. 0 partials: an item writes the result.
- logit_rows: i32[R] (padding: 0).
- num_items: i32[4], only the first entry is used.
- items: i32[max_items, 8].
- lists: i32[any].

The fields of an item are, in this order:

- its first row, and its number of rows.
- its first position, and its end.
- where position 0 of its session is in lists.
- the position of its first extra, and where that is in lists.
- the place of its first partial among those of each row; -1: write the result.

For each session the lists have its table, then the extras of its runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np

from specq.engines.native.compiler import kernels
from specq.engines.native.rows import LinePlaces, PackedRows, address, table_addresses
from specq.protocol import Int32Array

ITEM = 8  # integers
FIRST, COUNT, START, END, TABLE, SPLIT, EXTRAS, PART = range(ITEM)  # fields of an item, see the module

UNIT = 64  # positions in the smallest piece
GROWTH = 1024  # position where pieces grow to twice the size; they grow again at twice the position
NUM_SIZES = 5


def piece_size(position: int) -> int:
    """Return the size of the piece that has a position. Pieces begin at multiples of their size."""
    return UNIT << sum(position >= GROWTH << step for step in range(NUM_SIZES - 1))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the parts of a block lie; see the module.

    - num_rows: R, padded.
    - rows_per_block: the most rows of a session in one item.
    - num_chunks: about how many items fill the device.
    """

    num_rows: int
    rows_per_block: int
    num_chunks: int

    @property
    def max_items(self) -> int:
        return 2 * self.num_rows + min(4 * self.num_rows, 8) * self.num_chunks

    @property
    def max_partials(self) -> int:
        """Return the most rows of partial results. A step that needs more gets longer items."""
        return 3 * self.num_rows + 4 * self.rows_per_block * self.num_chunks

    def starts(self) -> dict[str, int]:
        """Return each part's offset in the block, in order; the same dict at every call."""
        return _starts(self)


@cache
def _starts(layout: BlockLayout) -> dict[str, int]:
    rows = layout.num_rows
    lengths = {"token_ids": rows, "positions": rows, "slots": rows, "lengths": rows, "spans": 2 * rows}
    lengths |= {"logit_rows": rows, "num_items": 4, "items": ITEM * layout.max_items, "lists": 0}
    return dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))


def max_list_length(rows: PackedRows) -> int:
    """Return the most slots that the lists of a step can have."""
    return int(np.maximum.reduceat(rows.ctx_lens, rows.row_starts[:-1]).sum()) + len(rows.extras)


class _Packed(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_rows", "num_sessions", "num_logits", "num_extras")),
        ("block", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
    )


class _Layout(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("num_rows", "rows_per_block", "num_chunks", "max_items", "max_partials")
    )


def lay_out(rows: PackedRows, layout: BlockLayout, block: Int32Array) -> int:
    """Fill a block (i32, long enough) for these rows, in C (kernels/rows.h). Return the length used."""
    library = kernels()
    assert library is not None  # the fused path needs a compiler, and so does Triton
    tables = table_addresses(rows.tables)
    sizes = rows.num_rows, rows.num_sessions, len(rows.logit_rows), len(rows.extras)
    packed = _Packed(*sizes, address(rows.block), address(tables))
    room = layout.max_items, layout.max_partials
    shape = _Layout(layout.num_rows, layout.rows_per_block, layout.num_chunks, *room)
    function = library.specq_lay_out
    function.restype = ctypes.c_int64
    used: int = function(ctypes.byref(packed), ctypes.byref(shape), ctypes.c_void_p(address(block)))
    if used < 0:
        raise MemoryError("no memory to lay out a step")
    return used


def line_places(block: Int32Array, layout: BlockLayout) -> LinePlaces:
    """Return where the lines of nodes are in a block that was laid out.

    Only the lines of the runs' last rows are included. A place may occur more than once.
    """
    starts = layout.starts()
    items = block[starts["items"] :][: ITEM * int(block[starts["num_items"]])].reshape(-1, ITEM).astype(np.int64)
    items = items[items[:, END] > items[:, SPLIT]]
    rows, lengths = items[:, FIRST] + items[:, COUNT] - 1, items[:, END] - items[:, SPLIT]
    return LinePlaces.of(rows, starts["lists"] + items[:, EXTRAS], lengths)
