"""Lay out a forward pass's integers for the fused path, as one int32 block. No torch.

The block is copied to the device at once. Attention is cut into work items. An item is a few rows of one session
against part of a slot list. So many programs read a long context in parallel. The rows of a session share what they
read:

- prefix item: a block of at most `rows_per_block` rows against `chunk` of the session's slots.
- nodes item: a run of rows against the extras of the last row. Each row is the child of the row before. It sees as many
  of these extras as it has itself.

Each item gives each of its rows a partial result. The partials of a row lie at equal distances: `spans` has their
places. One prefix item and one nodes item that cover a session form one item. Its result needs no combining.

The block's parts, for a padded number of rows R (padding: token 0, slot -1, no partials):

- token_ids, positions, slots: i32[R].
- visible: i32[2, R], how many table slots, and extras, a row sees.
- spans: i32[R, 3], first partial, distance, number of partials. 0 partials: the item writes the result directly.
- logit_rows: i32[R] (padding: 0).
- num_items: i32[4], only the first entry is used.
- items: i32[max_items, 8].
- lists: i32[any].

The fields of an item are, in this order:

- its first row, and its number of rows.
- its start and its length in lists.
- the position of the list's first slot.
- its first partial; -1: write the result directly.
- where the nodes begin in the list.
- 0.

For each session the lists have its table, then the slots that its runs see.
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
FIRST, COUNT, START, LENGTH, SPLIT = (
    0,
    1,
    2,
    3,
    6,
)  # fields of an item: its rows, its list, and where nodes begin in the list (0: only nodes)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the parts of a block lie; see the module.

    - num_rows: R, padded.
    - rows_per_block: the most rows of a session in one item.
    - num_chunks: about how many prefix items fill the device.
    - joins: whether nodes may join a prefix item, which then writes its result directly.
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
        """Return the most rows of partial results that a step can need."""
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
        (name, ctypes.c_int32) for name in ("num_rows", "rows_per_block", "num_chunks", "joins", "max_items")
    )


def lay_out(rows: PackedRows, layout: BlockLayout, block: Int32Array) -> int:
    """Fill a block (i32, long enough) for these rows, in C (kernels/rows.h). Return the length used."""
    library = kernels()
    assert library is not None  # the fused path needs a compiler, and so does Triton
    tables = table_addresses(rows.tables)
    sizes = rows.num_rows, rows.num_sessions, len(rows.logit_rows), len(rows.extras)
    packed = _Packed(*sizes, address(rows.block), address(tables))
    shape = _Layout(layout.num_rows, layout.rows_per_block, layout.num_chunks, layout.joins, layout.max_items)
    function = library.specq_lay_out
    function.restype = ctypes.c_int64
    used: int = function(ctypes.byref(packed), ctypes.byref(shape), ctypes.c_void_p(address(block)))
    if used < 0:
        raise MemoryError("no memory to lay out a step")
    return used


def line_places(block: Int32Array, layout: BlockLayout) -> LinePlaces:
    """Return where the lines of nodes are in a block that was laid out.

    Only lines whose rows are not part of a longer line are included. Trees that are chains are not included: their
    lines may be in other lists.
    """
    starts = layout.starts()
    items = block[starts["items"] :][: ITEM * int(block[starts["num_items"]])].reshape(-1, ITEM)
    firsts, counts, begins, lengths = items[items[:, SPLIT] == 0][:, [FIRST, COUNT, START, LENGTH]].T.astype(np.int64)
    return LinePlaces.of(firsts + counts - 1, starts["lists"] + begins, lengths)
