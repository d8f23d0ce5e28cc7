"""Triton kernels for the rows of blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def enter_block_kernel(
    texts_ptr, embedding_ptr, mask_ptr, norm_ptr, x_ptr, out_ptr, rows_ptr, spans_ptr, paths_ptr, contexts_ptr,
    num_tokens, chunk, num_parts, eps, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
):  # fmt: skip
    """Program (text, row of its block): the input of the row, and what attention must know of it.

    texts     i32[4, texts]: see `specq.drafting.block.passes.BlockPasses.logits`. Unknown tokens are clipped.
    mask      [HIDDEN]: the input of each row but the first.
    x         f32[rows, HIDDEN]: the input.
    out       [rows, HIDDEN]: its norm.
    rows      i32[5, rows]: see `specq.drafting.trees.gpu_kernels`. The first two are not written.
    spans     i32[rows, 2]: as in `attention.combine_kernel`, for parts of `chunk`, at most num_parts, behind the block.
    paths     i32[rows, SIZE]: all rows of the block.
    contexts  i32[2, texts]: places and lengths.
    """
    text, texts, own = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    row, num_rows = text * SIZE + own, texts * SIZE
    n = tl.arange(0, HIDDEN_PAD)
    inside = n < HIDDEN
    token = tl.minimum(tl.maximum(tl.load(texts_ptr + text), 0), num_tokens - 1).to(tl.int64)
    anchor = tl.load(embedding_ptr + token * HIDDEN + n, mask=inside & (own == 0), other=0.0).to(tl.float32)
    mask = tl.load(mask_ptr + n, mask=inside & (own > 0), other=0.0).to(tl.float32)
    x = anchor + mask
    to = row.to(tl.int64) * HIDDEN + n
    tl.store(x_ptr + to, x, mask=inside)
    norm = tl.load(norm_ptr + n, mask=inside, other=0.0).to(tl.float32)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)) * norm
    tl.store(out_ptr + to, normed.to(out_ptr.dtype.element_ty), mask=inside)
    length = tl.load(texts_ptr + 2 * texts + text)
    tl.store(rows_ptr + 2 * num_rows + row, row)
    tl.store(rows_ptr + 3 * num_rows + row, row)
    tl.store(rows_ptr + 4 * num_rows + row, length)
    tl.store(spans_ptr + row * 2, row * num_parts)
    tl.store(spans_ptr + row * 2 + 1, 1 + (length + chunk - 1) // chunk)
    place = tl.arange(0, SIZE_PAD)
    tl.store(paths_ptr + row * SIZE + place, text * SIZE + place, mask=place < SIZE)
    if own == 0:
        tl.store(contexts_ptr + text, tl.load(texts_ptr + 3 * texts + text))
        tl.store(contexts_ptr + texts + text, length)
