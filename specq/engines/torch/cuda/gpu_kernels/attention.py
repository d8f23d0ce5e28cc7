"""Triton kernels for attention over paged keys and values: items, then the combination of their partial results.

What a row sees is a list of slots. It is divided into pieces, and the work into items
(specq/engines/torch/cuda/attention_plan.py). All rows of an item share what it reads. So a prompt's chunk, plain rows
and trees are one kind of work. Many programs read a long context in parallel.

A row's bits do not depend on the items. Each piece gives the same partial result, and `fold` adds the pieces from the
first to the last. This happens in an item, in `combine_kernel`, or in both. The rules that make it so:

- A partial result is a scale, and the sums of weights and of weighted values relative to 2 to the power of this scale.
  Scales are whole numbers. So going to another scale rounds nothing (`power`).
- Sums over a block's positions are matrix products, the sum of weights too. Their order does not depend on which
  thread has which number.
- A position that a row does not see has weight 0. A block of such positions changes no bit of the sums.

Tiles of 16 lines and those of 64 use different instructions of the tensor cores (mma and wgmma). Rows have the same
bits in both only if the hardware adds both in one way. tests/engines/test_attention_bits.py compares them. If they
differ, `layers.FEW_LINES = layers.TILE_LINES` leaves one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specq.engines.torch.cuda import attention_plan

UNIT = tl.constexpr(attention_plan.UNIT)
GROWTH = tl.constexpr(attention_plan.GROWTH)
NUM_SIZES = tl.constexpr(attention_plan.NUM_SIZES)
NONE = tl.constexpr(-1.0e30)  # the scale of nothing
LEAST = tl.constexpr(-1.0e29)  # below any other scale
ONES = tl.constexpr(8)  # columns of ones, the fewest of a matrix product


@triton.jit
def power(exponent):
    """Return 2 to the power of whole numbers f32 <= 0. This is exact, and 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fold(scale, total, out, next_scale, next_total, next_out):
    """Add the next partial result to one: scales [lines], sums of weights [lines, any], of values [lines, any]."""
    both = tl.maximum(scale, next_scale)
    fade, share = power(scale - both)[:, None], power(next_scale - both)[:, None]
    return both, total * fade + next_total * share, out * fade + next_out * share


@triton.jit
def add_block(scale, total, out, scores, seen, v):
    """Add a block of positions to a piece: scores f32[lines, BLOCK] in log2, seen likewise, v [BLOCK, dim]."""
    scores = tl.where(seen, scores, NONE)
    both = tl.maximum(scale, tl.ceil(tl.max(scores, 1)))
    weights = tl.exp2(scores - tl.maximum(both, LEAST)[:, None]).to(v.dtype)  # 0 where nothing is seen
    fade = power(scale - both)[:, None]
    ones = tl.full((v.shape[0], ONES), 1.0, v.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    return both, total, tl.dot(weights, v, out * fade, input_precision="ieee")


@triton.jit
def _ends_piece(position):
    """Return whether a piece ends at a position > 0, which is a multiple of UNIT."""
    size = UNIT + position * 0
    for step in tl.static_range(NUM_SIZES - 1):
        size = tl.where(position > (GROWTH << step), UNIT << (step + 1), size)
    return (position & (size - 1)) == 0


@triton.jit
def _prefetch_slots(base_ptr, slot, HEAD_DIM: tl.constexpr):
    """Prefetch each slot's keys or values into the L2 cache, in lines of 128 bytes."""
    line = tl.arange(0, HEAD_DIM // 64) * 64 if HEAD_DIM >= 64 else tl.arange(0, 1)
    pointers = base_ptr + slot[:, None] * HEAD_DIM + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, num_items_ptr, items_ptr, lists_ptr, lengths_ptr, spans_ptr, partials_ptr, sums_ptr,
    out_ptr, kv_stride, log2_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one item. Program (item, key-value head).

    A program computes the item's rows, each with the GROUP heads of the key-value head. This makes up to LINES lines.
    Grids have a fixed size. Programs beyond `num_items` end at once.

    - q: [num_padded, HEADS * HEAD_DIM], rotated.
    - keys, values: the layer's [kv_heads, slots, HEAD_DIM]; heads are kv_stride apart.
    - items: i32[items, 8]; lists: i32, slots.
    - lengths: i32[num_padded], how many positions a row sees; spans: i32[num_padded, 2], its partials.
    - partials: f32[partial rows, HEADS, HEAD_DIM], sums of weighted values.
    - sums: f32[partial rows, HEADS, 2], scales and sums of weights.
    - out: as q.
    - log2_scale: of the scores; it includes the factor log2(e).
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    if item >= tl.load(num_items_ptr):
        if PDL:
            gdc_wait()
        return
    keys_ptr += kv_head.to(tl.int64) * kv_stride
    values_ptr += kv_head.to(tl.int64) * kv_stride
    items_ptr += item * 8
    row, num_rows = tl.load(items_ptr), tl.load(items_ptr + 1)
    start, end = tl.load(items_ptr + 2), tl.load(items_ptr + 3)
    table, split = tl.load(items_ptr + 4), tl.load(items_ptr + 5)
    extras, part = tl.load(items_ptr + 6) - split, tl.load(items_ptr + 7)
    line = tl.arange(0, LINES)
    dim = tl.arange(0, HEAD_DIM)
    line_row = row + line // GROUP
    real = line // GROUP < num_rows
    head = kv_head * GROUP + line % GROUP
    length = tl.load(lengths_ptr + line_row, mask=real, other=0)
    partial = tl.load(spans_ptr + line_row * 2, mask=real, other=0)
    length = tl.minimum(length, end)
    limit = tl.max(length, 0)  # no row sees more, and what is there may not be written yet
    column = tl.arange(0, UNIT)
    if PDL:
        index = start + column
        at = tl.where(index < split, table, extras) + index
        slot = tl.load(lists_ptr + at, mask=index < limit, other=0).to(tl.int64)
        _prefetch_slots(keys_ptr, slot, HEAD_DIM)
        _prefetch_slots(values_ptr, slot, HEAD_DIM)
        gdc_wait()
    at_q = (line_row * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + at_q, mask=real[:, None], other=0.0)
    scale = tl.full((LINES,), NONE, tl.float32)  # of the piece, then of all pieces so far
    total = tl.zeros((LINES, ONES), tl.float32)
    out = tl.zeros((LINES, HEAD_DIM), tl.float32)
    whole_scale, whole_total, whole_out = scale, total, out
    for first in range(start, end, UNIT):
        index = first + column
        listed = index < limit
        at = tl.where(index < split, table, extras) + index
        slot = tl.load(lists_ptr + at, mask=listed, other=0).to(tl.int64)
        at_slot = slot[:, None] * HEAD_DIM + dim[None, :]
        k = tl.load(keys_ptr + at_slot, mask=listed[:, None], other=0.0)
        v = tl.load(values_ptr + at_slot, mask=listed[:, None], other=0.0)
        seen = index[None, :] < length[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
        scale, total, out = add_block(scale, total, out, scores, seen, v)
        if _ends_piece(first + UNIT):
            whole_scale, whole_total, whole_out = fold(whole_scale, whole_total, whole_out, scale, total, out)
            scale = tl.full((LINES,), NONE, tl.float32)
            total = tl.zeros((LINES, ONES), tl.float32)
            out = tl.zeros((LINES, HEAD_DIM), tl.float32)
    scale, total, out = fold(whole_scale, whole_total, whole_out, scale, total, out)  # what was last, or nothing
    weight = tl.max(total, 1)  # all columns are the same
    if part < 0:
        out = out / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out_ptr + at_q, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        at_sums = ((partial + part) * HEADS + head).to(tl.int64)
        tl.store(partials_ptr + at_sums[:, None] * HEAD_DIM + dim[None, :], out, mask=real[:, None])
        tl.store(sums_ptr + at_sums * 2, scale, mask=real)
        tl.store(sums_ptr + at_sums * 2 + 1, weight, mask=real)


@triton.jit
def combine_kernel(
    partials_ptr, sums_ptr, spans_ptr, out_ptr,
    HEADS: tl.constexpr, SHARE: tl.constexpr, SHARE_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Fold the partials of a row, BLOCK loads at a time. Program (row, SHARE heads).

    spans i32[rows, 2]: first partial, number of partials. out: [rows, HEADS * HEAD_DIM]. Rows without partials do not
    change.
    """
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    first, count = tl.load(spans_ptr + row * 2), tl.load(spans_ptr + row * 2 + 1)
    if PDL:
        gdc_wait()
    if count == 0:
        return
    line = tl.arange(0, SHARE_PAD)
    real = line < SHARE
    head = tl.program_id(1) * SHARE + line
    dim = tl.arange(0, HEAD_DIM)
    scale = tl.full((SHARE_PAD,), NONE, tl.float32)
    total = tl.zeros((SHARE_PAD, 1), tl.float32)
    out = tl.zeros((SHARE_PAD, HEAD_DIM), tl.float32)
    for done in range(0, count, BLOCK):
        loaded = ()
        for i in tl.static_range(BLOCK):
            mask = real & (done + i < count)
            at = ((first + done + i) * HEADS + head).to(tl.int64)
            next_scale = tl.load(sums_ptr + at * 2, mask=mask, other=NONE)
            next_total = tl.load(sums_ptr + at * 2 + 1, mask=mask, other=0.0)
            at = at[:, None] * HEAD_DIM + dim[None, :]
            next_out = tl.load(partials_ptr + at, mask=mask[:, None], other=0.0)
            loaded += ((next_scale, next_total[:, None], next_out),)  # type: ignore[assignment]
        tl.debug_barrier()  # the loads are in flight together
        for i in tl.static_range(BLOCK):
            scale, total, out = fold(scale, total, out, loaded[i][0], loaded[i][1], loaded[i][2])
    out = out / tl.where(total > 0, total, 1.0)
    at = (row * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
