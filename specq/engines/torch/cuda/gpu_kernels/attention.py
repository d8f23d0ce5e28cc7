"""Triton kernels for attention over paged keys and values: chunks, then their combination.

What a row sees is a list of slots, cut into work items (specq/engines/torch/cuda/attention_plan.py). An item has a
chunk of the session's table, slots of tree nodes, or both. All rows of an item share what it reads. Each row uses the
part that it may see. An item gives its rows normalised partial results with the log2 of their weight. `combine_kernel`
adds them up. If a row has only one item, the item writes the final result. So prefill chunks, plain rows and trees are
one kind of work. Many programs read a long context in parallel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
    q_ptr, keys_ptr, values_ptr, num_items_ptr, items_ptr, lists_ptr, visible_ptr, partials_ptr, weights_ptr, out_ptr,
    kv_stride, scale, num_padded,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one item. Program (item, key-value head).

    A program computes the item's rows, each with the GROUP heads of the key-value head. This makes up to LINES lines.
    Grids have a fixed size. Programs beyond `num_items` end at once.

    - q: [num_padded, HEADS * HEAD_DIM], rotated.
    - keys, values: the layer's [kv_heads, slots, HEAD_DIM]; heads are kv_stride apart.
    - items: i32[items, 8]; lists: i32, slots.
    - visible: i32[2, num_padded], how much of its context and nodes a row sees.
    - partials: f32[partial rows, HEADS, HEAD_DIM]; weights: f32[partial rows, HEADS].
    - out: as q.
    - scale: includes the factor log2(e).
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
    row, num_rows = tl.load(items_ptr + item * 8), tl.load(items_ptr + item * 8 + 1)
    start, length = tl.load(items_ptr + item * 8 + 2), tl.load(items_ptr + item * 8 + 3)
    position, partial = tl.load(items_ptr + item * 8 + 4), tl.load(items_ptr + item * 8 + 5)
    split = tl.load(items_ptr + item * 8 + 6)
    line = tl.arange(0, LINES)
    dim = tl.arange(0, HEAD_DIM)
    line_row = row + line // GROUP
    real = line // GROUP < num_rows
    at_head = line_row * HEADS + kv_head * GROUP + line % GROUP
    context = tl.load(visible_ptr + line_row, mask=real, other=0)[:, None]
    nodes = tl.load(visible_ptr + num_padded + line_row, mask=real, other=0)[:, None]
    column = tl.arange(0, BLOCK)
    best = tl.full((LINES,), -1.0e30, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    out = tl.zeros((LINES, HEAD_DIM), tl.float32)
    if PDL:
        slot = tl.load(lists_ptr + start + column, mask=column < length, other=0).to(tl.int64)
        _prefetch_slots(keys_ptr, slot, HEAD_DIM)
        _prefetch_slots(values_ptr, slot, HEAD_DIM)
        gdc_wait()
    q = tl.load(q_ptr + at_head[:, None] * HEAD_DIM + dim[None, :], mask=real[:, None], other=0.0)
    for first in range(0, length, BLOCK):
        index = first + column
        listed = index < length
        slot = tl.load(lists_ptr + start + index, mask=listed, other=0).to(tl.int64)
        at_slot = slot[:, None] * HEAD_DIM + dim[None, :]
        k = tl.load(keys_ptr + at_slot, mask=listed[:, None], other=0.0)
        v = tl.load(values_ptr + at_slot, mask=listed[:, None], other=0.0)
        index = index[None, :]
        seen = listed[None, :] & tl.where(index < split, index + position < context, index - split < nodes)
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1.0e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        share = tl.where(seen, tl.exp2(scores - new_best[:, None]), 0.0)
        fade = tl.exp2(best - new_best)
        total = total * fade + tl.sum(share, 1)
        out = tl.dot(share.to(v.dtype), v, out * fade[:, None], input_precision="ieee")
        best = new_best
    inside = total > 0
    out = out / tl.where(inside, total, 1.0)[:, None]
    if partial < 0:
        at = at_head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        at_partial = (partial + line // GROUP) * HEADS + kv_head * GROUP + line % GROUP
        tl.store(partials_ptr + at_partial[:, None] * HEAD_DIM + dim[None, :], out, mask=real[:, None])
        weight = tl.where(inside, best + tl.log2(tl.where(inside, total, 1.0)), -1.0e30)
        tl.store(weights_ptr + at_partial, weight, mask=real)


@triton.jit
def combine_kernel(
    partials_ptr, weights_ptr, spans_ptr, out_ptr,
    HEADS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the partials of a row, BLOCK at a time. Program (row, SHARE heads) writes out [rows, HEADS * HEAD_DIM].

    spans i32[rows, 3]: first partial, distance to the next, number of partials. Rows without partials do not change.
    """
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    first, step, count = (
        tl.load(spans_ptr + row * 3),
        tl.load(spans_ptr + row * 3 + 1),
        tl.load(spans_ptr + row * 3 + 2),
    )
    if PDL:
        gdc_wait()
    if count == 0:
        return
    dim = tl.arange(0, HEAD_DIM)
    for head in range(tl.program_id(1) * SHARE, tl.program_id(1) * SHARE + SHARE):
        best = tl.full((1,), -1.0e30, tl.float32)
        total = tl.zeros((1,), tl.float32)
        out = tl.zeros((HEAD_DIM,), tl.float32)
        for done in range(0, count, BLOCK):
            index = done + tl.arange(0, BLOCK)
            mask = index < count
            at = (first + index * step) * HEADS + head
            weight = tl.load(weights_ptr + at, mask=mask, other=-1.0e30)
            partial = tl.load(partials_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=mask[:, None], other=0.0)
            new_best = tl.maximum(best, tl.max(weight, 0))
            share = tl.where(mask, tl.exp2(weight - new_best), 0.0)
            fade = tl.exp2(best - new_best)
            total = total * fade + tl.sum(share, 0)
            out = out * fade + tl.sum(partial * share[:, None], 0)
            best = new_best
        out = out / tl.where(total > 0, total, 1.0)
        tl.store(out_ptr + (row * HEADS + head) * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty))
