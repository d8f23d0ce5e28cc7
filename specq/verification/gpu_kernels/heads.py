"""`tops_kernel` finds each row's largest logit; `heads_kernel` gathers its likely tokens and sums the rest."""

# Triton's decorator and types are unknown to mypy, which sees no such package on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specq.verification.gpu_kernels.rows import (
    NO_TOKEN,
    log_min_p_of,
    logit_row_of,
    relative_logits,
    temperature_of,
    top_k_of,
    top_of,
    top_p_of,
)

HEAD = tl.constexpr(10.0)  # scaled logits from -HEAD up are gathered


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tops", "top_ids"])
def tops_kernel(logits, stride, vocab, splits, tops, top_ids, BLOCK: tl.constexpr):
    """(logit rows, splits): tops f32 and top_ids i32[splits, logit rows], the largest logit of each part and its first
    place; NaN if there is one."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base, part = logits + row * stride, split * tl.num_programs(0) + row
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    is_bad = tl.zeros([BLOCK], tl.int1)
    for at in range(split * BLOCK, vocab, splits * BLOCK):
        token_ids = at + lane
        x = tl.load(base + token_ids, mask=token_ids < vocab, other=float("-inf")).to(tl.float32)
        is_bad |= x != x
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_id = tl.where(is_better, token_ids, best_id)
    top = tl.max(best, 0)
    tl.store(top_ids + part, tl.min(tl.where(best == top, best_id, NO_TOKEN), 0))
    tl.store(tops + part, tl.where(tl.max(is_bad.to(tl.int32), 0) > 0, float("nan"), top))


@triton.jit(
    do_not_specialize=["splits", "num_logit_rows"],
    do_not_specialize_on_alignment=["words", "tops", "counts", "heads", "head_ids", "sums"],
)
def heads_kernel(
    logits, stride, vocab, splits, words, num_logit_rows, tops, counts, heads, head_ids, room, sums, ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(rows, splits): gather tokens with scaled >= -HEAD or nearly so into heads f32, where they are not yet divided by T,
    and head_ids i32[rows, splits, room], as far as there is room; counts i32[rows, splits] counts all. sums f64[rows, splits,
    2]: of the other tokens that min-p keeps the mass, and the mass times scaled logits. ALL: also of rows without top-k and
    top-p; else nothing is done there, and what is multiplied by scaled logits is left out."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = temperature_of(words, row)
    is_ranked = (top_k_of(words, row, vocab) > 0) | (top_p_of(words, row) < 1)
    if (temperature > 0) & (ALL | is_ranked):
        logit_row, least = logit_row_of(words, row), log_min_p_of(words, row)
        base, top = logits + logit_row * stride, top_of(tops, num_logit_rows, logit_row, splits)
        part = row * splits + split
        heads, head_ids = heads + part * room, head_ids + part * room
        inverse = 1.0 / temperature
        lane = tl.arange(0, BLOCK)
        mass = tl.zeros([BLOCK], tl.float32)
        moment = tl.zeros([BLOCK], tl.float32)
        count = tl.zeros([], tl.int32)
        for at in range(split * BLOCK, vocab, splits * BLOCK):
            token_ids = at + lane
            relative = relative_logits(base, token_ids, token_ids < vocab, top)
            scaled = relative * inverse
            is_head = scaled >= -HEAD
            weight = tl.where(is_head | (scaled < least), 0.0, tl.exp(scaled))
            mass += weight
            if ALL:
                moment += tl.where(weight > 0, weight * scaled, 0.0)
            num_heads = tl.sum(is_head.to(tl.int32), 0)
            if num_heads > 0:
                place = count + tl.cumsum(is_head.to(tl.int32), 0) - 1
                is_stored = is_head & (place < room)
                tl.store(heads + place, relative, mask=is_stored)
                tl.store(head_ids + place, token_ids, mask=is_stored)
                count += num_heads
        tl.store(counts + part, count)
        tl.store(sums + part * 2, tl.sum(mass.to(tl.float64), 0))
        tl.store(sums + part * 2 + 1, tl.sum(moment.to(tl.float64), 0))
