"""`tops_kernel` finds each row's largest logit. `heads_kernel` gathers its likely tokens and sums the rest."""

# Mypy does not know Triton's decorator and types, since the package is missing on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specq.verification.gpu_kernels.rows import (
    MAX_SPLITS,
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
UNROLLED = tl.constexpr(4)  # blocks whose logits are loaded before the first is used
OVERFULL = tl.constexpr(1 << 24)  # more than the room, also after adding other parts
LEAST = tl.constexpr(-1e4)  # a token there has no weight, and 0 times this is 0


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tops", "top_ids"])
def tops_kernel(logits, stride, vocab, splits, tops, top_ids, BLOCK: tl.constexpr):
    """Grid (logit rows, splits). Find the largest logit of each part and its first place. NaN if there is one.

    Writes tops f32[splits, logit rows] and top_ids i32[splits, logit rows].
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base, part = logits + row * stride, split * tl.num_programs(0) + row
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    is_bad = tl.zeros([BLOCK], tl.int1)
    for at in tl.range(split * BLOCK, vocab, splits * BLOCK, loop_unroll_factor=UNROLLED):
        token_ids = at + lane
        x = tl.load(base + token_ids, mask=token_ids < vocab, other=float("-inf")).to(tl.float32)
        is_bad |= x != x
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_id = tl.where(is_better, token_ids, best_id)
    top = tl.max(best, 0)
    tl.store(top_ids + part, tl.min(tl.where(best == top, best_id, NO_TOKEN), 0))
    tl.store(tops + part, tl.where(tl.max(is_bad.to(tl.int32), 0) > 0, float("nan"), top))


@triton.jit
def _sums(base, vocab, top, temperature, split, splits, BLOCK: tl.constexpr):
    """Return of a part's tokens the mass and the mass times scaled logits, both f64.

    The sums are float32 except for the last sum of 256 numbers. A lane adds a few hundred weights, and their errors are
    up as often as down. The likeliest tokens are counted separately. If they have nearly all the mass, a float32 sum
    would lose the other weights.
    """
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    num_tops = tl.zeros([BLOCK], tl.int32)
    inverse = 1.0 / temperature
    for at in tl.range(split * BLOCK, vocab, splits * BLOCK, loop_unroll_factor=UNROLLED):
        scaled = tl.maximum(relative_logits(base, at + lane, at + lane < vocab, top) * inverse, LEAST)
        weight = tl.where(scaled < 0, tl.exp(scaled), 0.0)
        mass += weight
        moment += weight * scaled
        num_tops += (scaled >= 0).to(tl.int32)
    return tl.sum(mass.to(tl.float64) + num_tops.to(tl.float64), 0), tl.sum(moment.to(tl.float64), 0)


@triton.jit
def _kept_sums(base, vocab, top, temperature, least, split, splits, BLOCK: tl.constexpr):
    """Return the same for the tokens that min-p keeps.

    For a token at its bound, the exact scaled logit decides.
    """
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    num_tops = tl.zeros([BLOCK], tl.int32)
    for at in range(split * BLOCK, vocab, splits * BLOCK):
        scaled = tl.div_rn(relative_logits(base, at + lane, at + lane < vocab, top), temperature)
        weight = tl.where((scaled >= least) & (scaled < 0), tl.exp(scaled), 0.0)
        mass += weight
        moment += tl.where(weight > 0, weight * scaled, 0.0)
        num_tops += (scaled >= 0).to(tl.int32)
    return tl.sum(mass.to(tl.float64) + num_tops.to(tl.float64), 0), tl.sum(moment.to(tl.float64), 0)


@triton.jit(
    do_not_specialize=["splits", "num_logit_rows", "of_all"],
    do_not_specialize_on_alignment=["words", "tops", "counts", "columns", "heights", "sums"],
)
def heads_kernel(
    logits, stride, vocab, splits, words, num_logit_rows, tops, counts, columns, heights, room, sums, of_all,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, splits), for rows with T > 0. Gather the likely tokens, and sum the others.

    With top-k or top-p, gather tokens with scaled >= -HEAD or nearly that. counts i32[rows, splits] is OVERFULL if
    there was too little room. columns and heights as in `_gather`. sums f64[rows, splits, 3]: the mass of the other
    tokens that min-p keeps, then 0, then the sum of `weigh_kernel`. For the other rows, if of_all, the sums are over
    all tokens that min-p keeps: mass, and mass times scaled logits.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = temperature_of(words, row)
    is_ranked = (top_k_of(words, row, vocab) > 0) | (top_p_of(words, row) < 1)
    if (temperature > 0) & ((of_all > 0) | is_ranked):
        logit_row, least = logit_row_of(words, row), log_min_p_of(words, row)
        base, top = logits + logit_row * stride, top_of(tops, num_logit_rows, logit_row, splits)
        part = row * splits + split
        if is_ranked:
            mass, height = _gather(
                base, vocab, top, temperature, least, split, splits, columns + part * room * BLOCK, room, BLOCK
            )
            moment = tl.zeros([], tl.float64)  # not needed
            tl.store(heights + part * BLOCK + tl.arange(0, BLOCK), height)
            tl.store(counts + part, tl.where(tl.max(height, 0) <= room, tl.sum(height, 0), OVERFULL))
        elif least > float("-inf"):
            mass, moment = _kept_sums(base, vocab, top, temperature, least, split, splits, BLOCK)
        else:
            mass, moment = _sums(base, vocab, top, temperature, split, splits, BLOCK)
        tl.store(sums + part * 3, mass)
        tl.store(sums + part * 3 + 1, moment)


@triton.jit
def _gather(base, vocab, top, temperature, least, split, splits, columns, room, BLOCK: tl.constexpr):
    """Gather the heads of a part, each lane in its own column, so that lanes need no exchange.

    columns i64[room, BLOCK] hold tokens, and in the low halves the bits of logits relative to the largest. Return the
    other tokens' mass f64, and the heights of the columns i32[BLOCK]. A height above the room means that heads are
    missing.
    """
    inverse = 1.0 / temperature
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    height = tl.zeros([BLOCK], tl.int32)
    for at in range(split * BLOCK, vocab, splits * BLOCK):
        token_ids = at + lane
        relative = relative_logits(base, token_ids, token_ids < vocab, top)
        scaled = relative * inverse
        is_head = scaled >= -HEAD
        mass += tl.where(is_head | (scaled < least), 0.0, tl.exp(scaled))
        packed = (token_ids.to(tl.int64) << 32) | relative.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(columns + height * BLOCK + lane, packed, mask=is_head & (height < room))
        height += is_head.to(tl.int32)
    return tl.sum(mass.to(tl.float64), 0), height


@triton.jit(
    do_not_specialize=["splits", "wide"],
    do_not_specialize_on_alignment=[
        "words",
        "counts",
        "columns",
        "heights",
        "scaled_out",
        "head_ids",
        "weights",
        "sums",
    ],
)
def weigh_kernel(
    logits, stride, vocab, splits, words, counts, columns, heights, room, wide, scaled_out, head_ids, weights, sums,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, splits). Write the heads of rows with top-k or top-p and at most `wide` heads, without gaps.

    Writes [rows, wide]: their scaled logits f32, tokens i32 and weights f64. The third of sums receives the weight of
    each part.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = temperature_of(words, row)
    is_ranked = (top_k_of(words, row, vocab) > 0) | (top_p_of(words, row) < 1)
    if (temperature > 0) & is_ranked:
        part, lane = row * splits + split, tl.arange(0, BLOCK)
        splits_of_row = tl.arange(0, MAX_SPLITS)
        of_splits = tl.load(counts + row * splits + splits_of_row, mask=splits_of_row < splits, other=0)
        if tl.sum(of_splits, 0) <= wide:
            height = tl.load(heights + part * BLOCK + lane)
            first = (
                row * wide + tl.sum(tl.where(splits_of_row < split, of_splits, 0), 0) + tl.cumsum(height, 0) - height
            )
            columns += part * room * BLOCK
            mass = tl.zeros([BLOCK], tl.float64)
            for level in range(tl.max(height, 0)):
                is_head = level < height
                packed = tl.load(columns + level * BLOCK + lane, mask=is_head, other=0)
                relative = (packed & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
                scaled = tl.div_rn(relative, temperature)
                weight = tl.exp(scaled.to(tl.float64))
                tl.store(scaled_out + first + level, scaled, mask=is_head)
                tl.store(head_ids + first + level, (packed >> 32).to(tl.int32), mask=is_head)
                tl.store(weights + first + level, weight, mask=is_head)
                mass += tl.where(is_head, weight, 0.0)
            tl.store(sums + part * 3 + 2, tl.sum(mass, 0))
