"""Triton kernels of heads: the attention of rows below contexts, and the choice of the nodes of trees.

Each context has the same number of rows, one context after the other. Each row has five integers, i32[*, rows]:

- the token that it reads.
- the row above it that provides its state.
- the slot of its keys and values. -1: not kept.
- the index of its rotation.
- how many rows of its context it sees.

Slots are those of keys and values of a head, [*, HEAD_DIM]. Rows may see further slots, those in `paths` i32[rows,
PATH].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specq.engines.torch.cuda.gpu_kernels.attention import NONE, ONES, add_block, power


@triton.jit(do_not_specialize=["depth", "chunk", "own_rows"])
def attend_kept_kernel(
    q_ptr, context_keys_ptr, context_values_ptr, keys_ptr, values_ptr, contexts_ptr, rows_ptr, paths_ptr, partials_ptr,
    sums_ptr, place_stride, head_stride, kv_stride, scale, depth, chunk,
    own_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PATH: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Program (context and block of its rows, key-value head, part): attention of the block's rows.

    Each row has the GROUP heads of the key-value head, up to LINES lines together. A part is a `chunk` of the context.
    If there are paths (PATH > 0), they are part 0. Parts beyond the context end at once. A part that a row does not see
    adds nothing to it. The parts are combined like those of `attention.attend_kernel`, with the same partials and
    sums. Partial row = row * parts + part.

    q                [rows, HEADS * HEAD_DIM], rotated.
    context_keys, context_values   [places, kv_heads, *, HEAD_DIM], with place_stride between places and head_stride
                     between heads.
    keys, values     the slots in paths, with kv_stride between heads.
    contexts         i32[2, contexts]: places and lengths.
    depth            how many entries of a path count.
    chunk            a multiple of BLOCK.
    scale            includes log2(e).
    own_rows         rows of a context.
    """
    LINE_ROWS: tl.constexpr = LINES // GROUP
    blocks = (own_rows + LINE_ROWS - 1) // LINE_ROWS
    context, contexts = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    kv_head, part = tl.program_id(1), tl.program_id(2)
    start = (part - 1) * chunk if PATH > 0 else part * chunk
    length = tl.load(contexts_ptr + contexts + context)
    if start >= length:
        return
    line = tl.arange(0, LINES)
    own_row = tl.program_id(0) % blocks * LINE_ROWS + line // GROUP
    real = (line < LINE_ROWS * GROUP) & (own_row < own_rows)
    row = context * own_rows + own_row
    limit = tl.load(rows_ptr + 4 * contexts * own_rows + row, mask=real, other=0)
    dim = tl.arange(0, DIM_PAD)
    is_dim = (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + line % GROUP
    at = (row * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + at, mask=real[:, None] & is_dim, other=0.0)
    best = tl.full((LINES,), NONE, tl.float32)
    total = tl.zeros((LINES, ONES), tl.float32)
    out = tl.zeros((LINES, DIM_PAD), tl.float32)
    if start < 0:
        keys_ptr += kv_head.to(tl.int64) * kv_stride
        values_ptr += kv_head.to(tl.int64) * kv_stride
        for level in range(depth):
            slot = tl.load(paths_ptr + row * PATH + level, mask=real, other=0).to(tl.int64)
            at_slot = slot[:, None] * HEAD_DIM + dim[None, :]
            k = tl.load(keys_ptr + at_slot, mask=real[:, None] & is_dim, other=0.0).to(tl.float32)
            v = tl.load(values_ptr + at_slot, mask=real[:, None] & is_dim, other=0.0).to(tl.float32)
            score = tl.sum(q.to(tl.float32) * k, 1) * scale
            new_best = tl.maximum(best, tl.ceil(score))
            share, fade = tl.exp2(score - new_best)[:, None], power(best - new_best)[:, None]
            total = total * fade + share
            out = out * fade + v * share
            best = new_best
    else:
        place = tl.load(contexts_ptr + context).to(tl.int64)
        base = place * place_stride + kv_head.to(tl.int64) * head_stride
        end = tl.minimum(start + chunk, length)
        for first in range(start, end, BLOCK):
            index = first + tl.arange(0, BLOCK)
            at_key = base + index[:, None] * HEAD_DIM + dim[None, :]
            mask = (index < end)[:, None] & is_dim
            k = tl.load(context_keys_ptr + at_key, mask=mask, other=0.0)
            v = tl.load(context_values_ptr + at_key, mask=mask, other=0.0)
            seen = (index < end)[None, :] & (index[None, :] < limit[:, None])
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            best, total, out = add_block(best, total, out, scores, seen, v)
        real = real & (start < limit)  # other rows do not see it, and their result is not read
    at_partial = ((row * tl.num_programs(2) + part) * HEADS + head).to(tl.int64)
    to = partials_ptr + at_partial[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, out, mask=real[:, None] & is_dim)
    tl.store(sums_ptr + at_partial * 2, best, mask=real)
    tl.store(sums_ptr + at_partial * 2 + 1, tl.max(total, 1), mask=real)


@triton.jit
def likeliest(reach, inside, COUNT_PAD: tl.constexpr, NODES_PAD: tl.constexpr):
    """Return i32[COUNT_PAD]: the indices of the largest of reach [NODES_PAD], largest first; 0 when none is left.

    Of equal values the earlier comes first. NaN values and values outside `inside` are chosen last.
    """
    index = tl.arange(0, NODES_PAD)
    reach = tl.where(inside & (reach == reach), reach, float("-inf"))
    is_before = (reach[None, :] == reach[:, None]) & (index[None, :] < index[:, None])
    order = tl.sum(((reach[None, :] > reach[:, None]) | is_before).to(tl.int32), 1)
    place = tl.arange(0, COUNT_PAD)
    return tl.sum(tl.where(order[:, None] == place[None, :], index[:, None], 0), 0)


@triton.jit
def _picked(values, chosen, COUNT: tl.constexpr):
    """Return values [COUNT] at the indices `chosen` [n]."""
    index = tl.arange(0, COUNT)
    return tl.sum(tl.where(index[:, None] == chosen[None, :], values[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["num_places", "count", "num_nodes", "num_levels"])
def grow_ranked_kernel(
    tokens_ptr, scores_ptr, sizes_ptr, nodes_ptr, num_places, count, num_nodes, num_levels,
    SIZE: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Program tree: the likeliest nodes of each level.

    tokens, scores   i32 and f32[trees, num_places, count]: of each place, likeliest first.
    sizes            i32[num_levels]: nodes of each level, at most SIZE.
    nodes            i32[4 + num_levels, trees, num_nodes]: see `specq.drafting.trees.device_trees`.
    """
    tree, trees = tl.program_id(0), tl.num_programs(0)
    index, place, level = tl.arange(0, SIZE * COUNT), tl.arange(0, SIZE), tl.arange(0, LEVELS)
    behind_all, rank_all = index // COUNT, index % COUNT
    reach = tl.zeros((SIZE,), tl.float32)
    lines = tl.zeros((LEVELS, SIZE), tl.int32)
    num_above, first_above, first = 1, -1, 0
    for depth in range(num_levels):
        size = tl.load(sizes_ptr + depth)
        own = (tree * num_places + depth) * count
        inside = (behind_all < num_above) & (rank_all < count)
        all_scores = tl.load(scores_ptr + own + rank_all, mask=inside, other=float("-inf"))
        chosen = likeliest(_picked(reach, behind_all, SIZE) + all_scores, inside, SIZE, SIZE * COUNT)
        behind, is_node = chosen // COUNT, place < size
        token = tl.load(tokens_ptr + own + chosen % COUNT, mask=is_node, other=0)
        score = tl.load(scores_ptr + own + chosen % COUNT, mask=is_node, other=0.0)
        reach = _picked(reach, behind, SIZE) + score
        is_same = place[:, None] == behind[None, :]
        lines = tl.sum(tl.where(is_same[None, :, :], lines[:, :, None], 0), 1)
        lines = tl.where(level[:, None] < depth, lines, (first + place)[None, :])
        to = nodes_ptr + tree * num_nodes + first + place
        plane = trees * num_nodes
        tl.store(to, token, mask=is_node)
        tl.store(to + plane, first_above + behind, mask=is_node)
        tl.store(to + 2 * plane, score.to(tl.int32, bitcast=True), mask=is_node)
        tl.store(to + 3 * plane, reach.to(tl.int32, bitcast=True), mask=is_node)
        of_line = (to + 4 * plane)[None, :] + level[:, None] * plane
        tl.store(of_line, lines, mask=is_node[None, :] & (level < num_levels)[:, None])
        num_above, first_above, first = size, first, first + size


def grow_ranked(
    token_ids: torch.Tensor, scores: torch.Tensor, sizes: Sequence[int], there: torch.Tensor
) -> torch.Tensor:
    """Return the nodes of each context; see `specq.drafting.trees.device_trees.likeliest_on_device`."""
    num_trees, num_places, count = token_ids.shape
    nodes = token_ids.new_empty(4 + len(sizes), num_trees, sum(sizes))
    grow_ranked_kernel[(num_trees,)](
        token_ids.contiguous(), scores.contiguous(), there, nodes, num_places, count, nodes.shape[2], len(sizes),
        SIZE=max(int(triton.next_power_of_2(max(sizes))), 8), COUNT=max(int(triton.next_power_of_2(count)), 16),
        LEVELS=max(int(triton.next_power_of_2(len(sizes))), 8), num_warps=4,
    )  # fmt: skip
    return nodes
