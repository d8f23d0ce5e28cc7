"""`distributions_kernel` finds where top-k and top-p cut a row, and the mass that is kept.

It uses the tokens that `heads_kernel` gathered, or the whole row if these are not enough. `probs_kernel` looks up the
probabilities of tokens in known distributions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specq.verification.gpu_kernels.rows import (
    MAX_SPLITS,
    NO_TOKEN,
    log_min_p_of,
    logit_row_of,
    probs_of,
    relative_logits,
    temperature_of,
    top_k_of,
    top_of,
    top_p_of,
)

# Mypy does not know Triton's decorator and types, since the package is missing on a machine without a GPU.
# mypy: ignore-errors


@triton.jit(
    do_not_specialize=["splits", "width"],
    do_not_specialize_on_alignment=["words", "distributions", "which", "asked", "probs"],
)
def probs_kernel(
    logits, stride, vocab, splits, words, distributions, which, asked, width, probs, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (n). Look up the probabilities of the tokens asked i64[n, width] in the rows which i64[n].

    Writes probs f64[n, width]. The distributions f64[rows, 4] are as in `Distributions`. The result is 0 for an invalid
    token, such as -1.
    """
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(which + place)
    lane = tl.arange(0, BLOCK)
    for at in range(0, width, BLOCK):
        is_asked = at + lane < width
        token_ids = tl.load(asked + place * width + at + lane, mask=is_asked, other=-1)
        found = probs_of(logits, stride, vocab, words, distributions, row, token_ids)
        tl.store(probs + place * width + at + lane, found, mask=is_asked)


LAST_KEY = tl.constexpr(0x7F800000)  # of -inf


@triton.jit
def _key(scaled):
    """Return sort keys. Scaled logits are <= 0, so the bits of their absolute values ascend where they descend."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _bound_of(key):
    return -(key.to(tl.float32, bitcast=True))


@triton.jit
def _split_at(
    base, top, temperature, vocab, scaled_in, weights, num_heads, in_row, last, middle,
    BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Split the tokens with keys up to `last` at the key `middle`.

    The tokens are the gathered ones, or those of the row if in_row. Return the weight or the number of keys below
    `middle`, f64. Then return the largest such key, and the smallest other, i32.
    """
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    below = tl.full([BLOCK], -1, tl.int32)
    above = tl.full([BLOCK], NO_TOKEN, tl.int32)
    if in_row:
        parts = tl.zeros([BLOCK], tl.float32)
        for at in range(0, vocab, BLOCK):
            scaled = tl.div_rn(relative_logits(base, at + lane, at + lane < vocab, top), temperature)
            key = tl.where(at + lane < vocab, _key(scaled), NO_TOKEN)
            is_below = (key < middle) & (key <= last)
            parts += tl.where(is_below, 1.0 if BY_COUNT else tl.exp(scaled), 0.0)
            below = tl.maximum(below, tl.where(is_below, key, -1))
            above = tl.minimum(above, tl.where(is_below | (key > last), NO_TOKEN, key))
        sums = parts.to(tl.float64)
    else:
        for at in range(0, num_heads, BLOCK):
            is_head = at + lane < num_heads
            key = tl.where(is_head, _key(tl.load(scaled_in + at + lane, mask=is_head, other=0.0)), NO_TOKEN)
            is_below = (key < middle) & (key <= last)
            if BY_COUNT:
                sums += is_below.to(tl.float64)
            else:
                sums += tl.where(is_below, tl.load(weights + at + lane, mask=is_head, other=0.0), 0.0)
            below = tl.maximum(below, tl.where(is_below, key, -1))
            above = tl.minimum(above, tl.where(is_below | (key > last), NO_TOKEN, key))
    return tl.sum(sums, 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def _key_reaching(
    base, top, temperature, vocab, scaled_in, weights, num_heads, in_row, last, aim,
    BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the key, among those up to `last`, at which the sum over ascending keys reaches `aim`.

    This is a bisection in which each end moves to the next existing key.
    """
    low, high = tl.zeros([], tl.int32), last + 1  # the sum below low is less than aim, the sum below high is not
    while high - low > 1:
        middle = low + (high - low) // 2
        mass, below, above = _split_at(
            base, top, temperature, vocab, scaled_in, weights, num_heads, in_row, last, middle, BY_COUNT, BLOCK
        )
        low, high = tl.where(mass < aim, above, low), tl.where(mass < aim, high, below + 1)
    return tl.minimum(low, last)


@triton.jit(
    do_not_specialize=["splits", "num_logit_rows", "of_all", "wide"],
    do_not_specialize_on_alignment=["words", "tops", "counts", "scaled", "weights", "sums", "distributions", "places"],
)
def distributions_kernel(
    logits, stride, vocab, splits, words, num_logit_rows, tops, counts, wide, scaled, weights, sums, distributions,
    places, of_all,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Write distributions f64[rows, 4], as in `Distributions`, and places i32[rows].

    places is 1 if all kept tokens are among the gathered heads. Their scaled logits and weights come from
    `weigh_kernel`. Rows as in `heads_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = temperature_of(words, row), top_k_of(words, row, vocab), top_p_of(words, row)
    is_ranked = (top_k > 0) | (top_p < 1)
    if (temperature > 0) & ((of_all > 0) | is_ranked):
        logit_row, bound = logit_row_of(words, row), log_min_p_of(words, row)
        base, top = logits + logit_row * stride, top_of(tops, num_logit_rows, logit_row, splits)
        part, split = row * splits, tl.arange(0, MAX_SPLITS)
        parts, is_part = sums + (part + split) * 3, split < splits
        mass = tl.sum(tl.load(parts, mask=is_part, other=0.0), 0)
        moment = tl.sum(tl.load(parts + 1, mask=is_part, other=0.0), 0)
        is_in_heads = tl.zeros([], tl.int32)
        if is_ranked:
            of_splits = tl.load(counts + part + split, mask=is_part, other=0)
            count = tl.sum(of_splits, 0)
            fits = count <= wide
            head_mass = tl.sum(tl.load(parts + 2, mask=is_part & fits, other=0.0), 0)
            bound, mass, moment, is_in_heads = _ranked(
                base, top, temperature, vocab, scaled + row * wide, weights + row * wide, count, fits, head_mass,
                mass, top_k, top_p,
                bound, BLOCK,
            )  # fmt: skip
        tl.store(distributions + row * 4, top.to(tl.float64))
        tl.store(distributions + row * 4 + 1, bound.to(tl.float64))
        tl.store(distributions + row * 4 + 2, mass)
        tl.store(distributions + row * 4 + 3, moment)
        tl.store(places + row, is_in_heads)


@triton.jit
def _ranked(
    base, top, temperature, vocab, scaled, weights, count, fits, head_mass, low_mass, top_k, top_p, least,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the bound, mass and moment of a row with top-k or top-p, and 1 if they come from the heads alone.

    That is the case if the heads are present and enough.
    """
    num_heads = tl.where(fits, count, 0)
    reaches = tl.where(top_k > 0, count >= top_k, head_mass >= top_p * (head_mass + low_mass))
    in_row = (fits == 0) | (reaches == 0)
    last = tl.full([], LAST_KEY, tl.int32)
    if top_k > 0:
        last = _key_reaching(
            base, top, temperature, vocab, scaled, weights, num_heads, in_row, last, top_k.to(tl.float64), True, BLOCK
        )
    if top_p < 1:
        total = head_mass + low_mass
        if (top_k > 0) | in_row:
            total, _, _ = _split_at(
                base, top, temperature, vocab, scaled, weights, num_heads, in_row, last, last + 1, False, BLOCK
            )
        last = _key_reaching(
            base, top, temperature, vocab, scaled, weights, num_heads, in_row, last, top_p * total, False, BLOCK
        )
    bound = tl.maximum(_bound_of(last), least)
    mass, moment = _kept(base, top, temperature, vocab, scaled, weights, num_heads, in_row, bound, BLOCK)
    return bound, mass, moment, (in_row == 0).to(tl.int32)


@triton.jit
def _kept(base, top, temperature, vocab, heads, weights, num_heads, in_row, bound, BLOCK: tl.constexpr):
    """Return (f64, f64): the weight, and weight times scaled logits, of tokens with scaled >= bound.

    The tokens are the heads or the row.
    """
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    moment = tl.zeros([BLOCK], tl.float64)
    if in_row:
        for at in range(0, vocab, BLOCK):
            scaled = tl.div_rn(relative_logits(base, at + lane, at + lane < vocab, top), temperature)
            weight = tl.where(scaled >= bound, tl.exp(scaled), 0.0)
            mass += weight.to(tl.float64)
            moment += tl.where(weight > 0, weight * scaled, 0.0).to(tl.float64)
    else:
        for at in range(0, num_heads, BLOCK):
            is_head = at + lane < num_heads
            scaled = tl.load(heads + at + lane, mask=is_head, other=float("-inf"))
            weight = tl.load(weights + at + lane, mask=is_head & (scaled >= bound), other=0.0)
            mass += weight
            moment += tl.where(weight > 0, weight * scaled.to(tl.float64), 0.0)
    return tl.sum(mass, 0), tl.sum(moment, 0)
