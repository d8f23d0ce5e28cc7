"""`choose_kernel` draws each row's own token: the argmax of scaled logits plus noise."""

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

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
LOG2 = tl.constexpr(0.6931471805599453)
MARGIN = tl.constexpr(1e-3)


@triton.jit
def _splitmix(x):
    x += GOLDEN
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _keys(words, row):
    """Return the two keys i32 of a row's noise: `specq.verification.noise` with domain 1."""
    seed = tl.load(words + row * 6 + 2).to(tl.uint64)
    position = tl.load(words + row * 6 + 1).to(tl.uint64)
    mixed = _splitmix(_splitmix(seed ^ GOLDEN) + position)
    return (mixed & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), (mixed >> 32).to(tl.uint32).to(
        tl.int32, bitcast=True
    )


@triton.jit
def _hash(token_ids, key0, key1):
    """Return `specq.verification.noise.hash_tokens` of int32."""
    x = token_ids * -1640531535 + key0
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x7FEB352D
    x += key1
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261
    x ^= (x >> 16) & 0xFFFF
    return x


@triton.jit
def _gumbel(hashes):
    """Return noise f32 by its definition. 1 - u is exact in float64, so its logarithm is log1p(-u)."""
    u = (hashes.to(tl.float64) + 2147483648.5) * 2.3283064365386963e-10  # 2**-32
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@triton.jit
def _limit(scaled, hashes):
    """Return an upper bound of scaled + noise, less than 0.07 above it.

    It uses -log(-log1p(-u)) <= -log(u). A float's bits, as an integer, are at most 2**23 * (log2 + 127). Half of the
    hash, rounded down, fits int32.
    """
    half = ((hashes ^ -2147483648) >> 1) & 0x7FFFFFFF
    log2 = half.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 127.0  # 2**-23
    return scaled + ((31.0 - log2) * LOG2 + MARGIN)


@triton.jit
def _better(relative, is_token, temperature, inverse, bound, token_ids, lane, key0, key1, best, best_id):
    """Return the best score and its token, of the best so far and some more tokens.

    Exact scaled logits and noise are computed only for tokens whose upper bound can win.
    """
    scaled = relative * inverse
    limit = tl.where(is_token & (scaled >= bound - MARGIN), _limit(scaled, _hash(token_ids, key0, key1)), float("-inf"))
    highest = tl.max(limit, 0)
    while (highest >= best) & (highest > float("-inf")):
        is_it = lane == tl.argmax(limit, 0)
        token_id = tl.sum(tl.where(is_it, token_ids, 0), 0)
        exact = tl.div_rn(tl.sum(tl.where(is_it, relative, 0.0), 0), temperature)
        score = exact + _gumbel(_hash(token_id, key0, key1))
        is_better = (exact >= bound) & ((score > best) | ((score == best) & (token_id < best_id)))
        best, best_id = tl.where(is_better, score, best), tl.where(is_better, token_id, best_id)
        limit = tl.where(is_it, float("-inf"), limit)
        highest = tl.max(limit, 0)
    return best, best_id


@triton.jit(
    do_not_specialize=["splits", "num_logit_rows", "wide"],
    do_not_specialize_on_alignment=[
        "words",
        "tops",
        "top_ids",
        "counts",
        "heads",
        "head_ids",
        "distributions",
        "places",
        "scores",
        "score_ids",
        "which",
    ],
)
def choose_kernel(
    logits, stride, vocab, splits, words, num_logit_rows, tops, top_ids, counts, heads, head_ids, wide, distributions,
    places, scores,
    score_ids, which, OF_SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts). Find the largest of scaled logits plus noise in each part. At T = 0, of logits.

    Writes scores f32[parts, rows] and score_ids i32[parts, rows], the first place of the largest. Rows with top-k or
    top-p have distributions. For rows with places, only the heads are read. OF_SOME: the rows are `which` i32[rows].
    Otherwise all rows, with as many parts as splits.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * tl.num_programs(0) + row
    if OF_SOME:
        row = tl.load(which + row).to(tl.int64)
    temperature, logit_row = temperature_of(words, row), logit_row_of(words, row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], NO_TOKEN, tl.int32)
    if temperature > 0:
        base, top = logits + logit_row * stride, top_of(tops, num_logit_rows, logit_row, splits)
        bound, in_heads = log_min_p_of(words, row), temperature < 0  # never, so far
        if (top_k_of(words, row, vocab) > 0) | (top_p_of(words, row) < 1):
            bound = tl.load(distributions + row * 4 + 1).to(tl.float32)
            in_heads = tl.load(places + row) > 0
        key0, key1 = _keys(words, row)
        if in_heads:
            split = tl.arange(0, MAX_SPLITS)
            count = tl.sum(tl.load(counts + row * splits + split, mask=split < splits, other=0), 0)
            best, best_id = _best_head(
                bound, count, heads + row * wide, head_ids + row * wide, part, key0, key1, best, best_id, BLOCK
            )
        else:
            best, best_id = _best_token(base, vocab, top, temperature, bound, part, key0, key1, best, best_id, BLOCK)
    elif part < splits:
        best = tl.load(tops + part * num_logit_rows + logit_row)
        best_id = tl.load(top_ids + part * num_logit_rows + logit_row)
    tl.store(scores + at, best)
    tl.store(score_ids + at, best_id)


@triton.jit
def _best_head(bound, count, heads, head_ids, part, key0, key1, best, best_id, BLOCK: tl.constexpr):
    """Return the best score in a part of a row's heads, and its token."""
    lane = tl.arange(0, BLOCK)
    for at in range(part * BLOCK, count, tl.num_programs(1) * BLOCK):
        is_head = at + lane < count
        scaled = tl.load(heads + at + lane, mask=is_head, other=float("-inf"))
        token_ids = tl.load(head_ids + at + lane, mask=is_head, other=0)
        best, best_id = _better(scaled, is_head, 1.0, 1.0, bound, token_ids, lane, key0, key1, best, best_id)
    return best, best_id


@triton.jit
def _best_token(base, vocab, top, temperature, bound, part, key0, key1, best, best_id, BLOCK: tl.constexpr):
    """Return the best score in a part of the row, and its token."""
    lane, inverse = tl.arange(0, BLOCK), 1.0 / temperature
    for at in range(part * BLOCK, vocab, tl.num_programs(1) * BLOCK):
        token_ids = at + lane
        is_token = token_ids < vocab
        relative = relative_logits(base, token_ids, is_token, top)
        best, best_id = _better(
            relative, is_token, temperature, inverse, bound, token_ids, lane, key0, key1, best, best_id
        )
    return best, best_id


@triton.jit(
    do_not_specialize=["splits", "num_parts"],
    do_not_specialize_on_alignment=["scores", "score_ids", "highest", "token_ids", "fed_ids"],
)
def pick_kernel(
    logits, stride, vocab, splits, scores, score_ids, num_parts, highest, token_ids, fed_ids, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Combine the parts of each row.

    - highest f32[rows]: the largest score of any part. NaN if a part has NaN.
    - token_ids i32[rows]: its first token.
    - fed_ids i32[rows]: the same, or any valid token if there is none.
    """
    row, part = tl.program_id(0), tl.arange(0, MAX_SPLITS)
    at = part * tl.num_programs(0) + row
    score = tl.load(scores + at, mask=part < num_parts, other=float("-inf"))
    ids = tl.load(score_ids + at, mask=part < num_parts, other=NO_TOKEN)
    best = tl.max(score, 0)
    token_id = tl.min(tl.where(score == best, ids, NO_TOKEN), 0)
    tl.store(highest + row, tl.where(tl.max((score != score).to(tl.int32), 0) > 0, float("nan"), best))
    tl.store(token_ids + row, token_id)
    tl.store(fed_ids + row, tl.minimum(token_id, vocab - 1).to(tl.int32))
