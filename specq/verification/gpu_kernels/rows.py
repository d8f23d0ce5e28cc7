"""Triton kernels for `specq.verification.cuda_rows`: own tokens and laws of rows of logits, each row read two or three times.

`specq.verification.sampling` defines the values. In the order in which they run: `tops_kernel` finds each row's largest
logit; `heads_kernel` gathers its likely tokens and sums the rest; `laws_kernel` finds where top-k and top-p cut, among the
gathered tokens or, where these do not suffice, in the row; `choose_kernel` draws the own token.

Where the grid is (rows, splits), program (row, split) has the blocks split, split + splits, ... of the row, and what the
programs find is combined by whoever reads it. These programs are one warp each, so that their many small reductions need no
barrier. What a kernel is compiled for depends on the vocabulary and the type of the logits alone. Rows come as ROW of `specq.verification.packing` lies in memory, in words of 8 bytes.
"""

# Triton's decorator and types are unknown to mypy, which sees no such package on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

HEAD = tl.constexpr(10.0)  # scaled logits from -HEAD up are gathered
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
LAST_KEY = tl.constexpr(0x7F800000)  # of -inf
LOG2 = tl.constexpr(0.6931471805599453)
MARGIN = tl.constexpr(1e-3)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
MAX_SPLITS = tl.constexpr(64)


@triton.jit
def _logit_row(words, row):
    return tl.load(words + row * 6)


@triton.jit
def _temperature(words, row):
    return tl.load(words.to(tl.pointer_type(tl.float32)) + row * 12 + 10)


@triton.jit
def _log_min_p(words, row):
    return tl.load(words.to(tl.pointer_type(tl.float32)) + row * 12 + 11)


@triton.jit
def _top_p(words, row):
    return tl.load(words.to(tl.pointer_type(tl.float64)) + row * 6 + 4)


@triton.jit
def _top_k(words, row, vocab):
    """0 for none."""
    top_k = tl.load(words + row * 6 + 3)
    return tl.where(top_k < vocab, top_k, 0)


@triton.jit
def _top(tops, num_logit_rows, logit_row, splits):
    """The largest logit of a row; NaN if a split found one."""
    split = tl.arange(0, MAX_SPLITS)
    parts = tl.load(tops + split * num_logit_rows + logit_row, mask=split < splits, other=float("-inf"))
    is_nan = tl.max((parts != parts).to(tl.int32), 0)
    return tl.where(is_nan > 0, float("nan"), tl.max(parts, 0))


@triton.jit
def _relative(base, token_ids, is_token, top):
    """Logits f32 of some tokens of a row relative to its largest, -inf where there is none. Divided by T, with correct
    rounding, they are the scaled logits; that is slow, and done only where it can decide."""
    return tl.load(base + token_ids, mask=is_token, other=float("-inf")).to(tl.float32) - top


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
    temperature = _temperature(words, row)
    is_ranked = (_top_k(words, row, vocab) > 0) | (_top_p(words, row) < 1)
    if (temperature > 0) & (ALL | is_ranked):
        logit_row, least = _logit_row(words, row), _log_min_p(words, row)
        base, top = logits + logit_row * stride, _top(tops, num_logit_rows, logit_row, splits)
        part = row * splits + split
        heads, head_ids = heads + part * room, head_ids + part * room
        inverse = 1.0 / temperature
        lane = tl.arange(0, BLOCK)
        mass = tl.zeros([BLOCK], tl.float32)
        moment = tl.zeros([BLOCK], tl.float32)
        count = tl.zeros([], tl.int32)
        for at in range(split * BLOCK, vocab, splits * BLOCK):
            token_ids = at + lane
            relative = _relative(base, token_ids, token_ids < vocab, top)
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


@triton.jit
def _key(scaled):
    """Scaled logits are <= 0: as keys, the bits of their absolute values ascend where they descend."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _bound_of(key):
    return -(key.to(tl.float32, bitcast=True))


@triton.jit
def _split_at(
    base, top, temperature, vocab, scaled_in, weights, num_heads, in_row, last, middle,
    BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the gathered tokens or, if in_row, of the row, those with keys up to `last`: f64, the weight, or the number, of
    keys below `middle`; i32, the largest of these; i32, the smallest other."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    below = tl.full([BLOCK], -1, tl.int32)
    above = tl.full([BLOCK], NO_TOKEN, tl.int32)
    if in_row:
        parts = tl.zeros([BLOCK], tl.float32)
        for at in range(0, vocab, BLOCK):
            scaled = tl.div_rn(_relative(base, at + lane, at + lane < vocab, top), temperature)
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
    """The key, among those up to `last`, at which the sum over ascending keys reaches `aim`: bisection, in which either end
    goes on to the next key that there is."""
    low, high = tl.zeros([], tl.int32), last + 1  # the sum of keys below low is less than aim, that below high is not
    while high - low > 1:
        middle = low + (high - low) // 2
        mass, below, above = _split_at(
            base, top, temperature, vocab, scaled_in, weights, num_heads, in_row, last, middle, BY_COUNT, BLOCK
        )
        low, high = tl.where(mass < aim, above, low), tl.where(mass < aim, high, below + 1)
    return tl.minimum(low, last)


@triton.jit(
    do_not_specialize=["splits", "num_logit_rows", "of_all"],
    do_not_specialize_on_alignment=[
        "words",
        "tops",
        "counts",
        "heads",
        "scaled_out",
        "weights",
        "sums",
        "laws",
        "places",
    ],
)
def laws_kernel(
    logits, stride, vocab, splits, words, num_logit_rows, tops, counts, heads, room, scaled_out, weights, sums, laws, places,
    of_all,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(rows): laws f64[rows, 4] as in `Laws`; places i32[rows]: 1 where all that is kept is among the gathered heads.
    scaled_out f32 and weights f64[rows, splits * room] are for work. Rows as in `heads_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = _temperature(words, row), _top_k(words, row, vocab), _top_p(words, row)
    is_ranked = (top_k > 0) | (top_p < 1)
    if (temperature > 0) & ((of_all > 0) | is_ranked):
        logit_row, least = _logit_row(words, row), _log_min_p(words, row)
        base, top = logits + logit_row * stride, _top(tops, num_logit_rows, logit_row, splits)
        part = row * splits
        scaled_out, weights = scaled_out + part * room, weights + part * room
        split = tl.arange(0, MAX_SPLITS)
        of_splits = tl.load(counts + part + split, mask=split < splits, other=0)
        low_mass = tl.sum(tl.load(sums + (part + split) * 2, mask=split < splits, other=0.0), 0)
        low_moment = tl.sum(tl.load(sums + (part + split) * 2 + 1, mask=split < splits, other=0.0), 0)
        count, fits = tl.sum(of_splits, 0), tl.max(of_splits, 0) <= room
        num_heads = tl.where(fits, count, 0)
        head_mass = tl.zeros([], tl.float64)
        if fits:
            head_mass = _weigh(
                counts + part, heads + part * room, room, splits, temperature, scaled_out, weights, BLOCK
            )
        reaches = tl.where(top_k > 0, count >= top_k, head_mass >= top_p * (head_mass + low_mass))
        in_row = (fits == 0) | (is_ranked & (reaches == 0))

        last = tl.full([], LAST_KEY, tl.int32)
        if top_k > 0:
            last = _key_reaching(
                base, top, temperature, vocab, scaled_out, weights, num_heads, in_row, last, top_k.to(tl.float64),
                True, BLOCK,
            )  # fmt: skip
        if top_p < 1:
            total = head_mass + low_mass
            if (top_k > 0) | in_row:
                total, _, _ = _split_at(
                    base, top, temperature, vocab, scaled_out, weights, num_heads, in_row, last, last + 1, False, BLOCK
                )
            last = _key_reaching(
                base, top, temperature, vocab, scaled_out, weights, num_heads, in_row, last, top_p * total, False, BLOCK
            )
        bound = tl.maximum(tl.where(is_ranked, _bound_of(last), float("-inf")), least)
        mass, moment = _kept(base, top, temperature, vocab, scaled_out, weights, num_heads, in_row, bound, BLOCK)
        is_whole = is_ranked | in_row
        tl.store(laws + row * 4, top.to(tl.float64))
        tl.store(laws + row * 4 + 1, bound.to(tl.float64))
        tl.store(laws + row * 4 + 2, tl.where(is_whole, mass, mass + low_mass))
        tl.store(laws + row * 4 + 3, tl.where(is_whole, moment, moment + low_moment))
        tl.store(places + row, (is_ranked & (in_row == 0)).to(tl.int32))


@triton.jit
def _weigh(counts, heads, room, splits, temperature, scaled_out, weights, BLOCK: tl.constexpr):
    """Divide a row's heads by T; write them without gaps, and their weights; return the sum of these."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    filled = tl.zeros([], tl.int32)
    for split in range(splits):
        count = tl.load(counts + split)
        for at in range(0, count, BLOCK):
            is_head = at + lane < count
            scaled = tl.div_rn(
                tl.load(heads + split * room + at + lane, mask=is_head, other=float("-inf")), temperature
            )
            weight = tl.exp(scaled.to(tl.float64))
            tl.store(scaled_out + filled + at + lane, scaled, mask=is_head)
            tl.store(weights + filled + at + lane, weight, mask=is_head)
            mass += weight
        filled += count
    tl.debug_barrier()  # other threads read them
    return tl.sum(mass, 0)


@triton.jit
def _kept(base, top, temperature, vocab, heads, weights, num_heads, in_row, bound, BLOCK: tl.constexpr):
    """(f64, f64): the weight, and weight times scaled logits, of tokens with scaled >= bound: of the heads or the row."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    moment = tl.zeros([BLOCK], tl.float64)
    if in_row:
        for at in range(0, vocab, BLOCK):
            scaled = tl.div_rn(_relative(base, at + lane, at + lane < vocab, top), temperature)
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


@triton.jit
def _splitmix(x):
    x += GOLDEN
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _keys(words, row):
    """The two keys i32 of a row's noise; `specq.verification.seeds` with domain 1."""
    seed = tl.load(words + row * 6 + 2).to(tl.uint64)
    position = tl.load(words + row * 6 + 1).to(tl.uint64)
    mixed = _splitmix(_splitmix(seed ^ GOLDEN) + position)
    return (mixed & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), (mixed >> 32).to(tl.uint32).to(
        tl.int32, bitcast=True
    )


@triton.jit
def _hash(token_ids, key0, key1):
    """`specq.verification.noise.hash_tokens`, of int32."""
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
    """Noise f32 as it is defined: 1 - u is exact in float64, so its logarithm is log1p(-u)."""
    u = (hashes.to(tl.float64) + 2147483648.5) * 2.3283064365386963e-10  # 2**-32
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@triton.jit
def _limit(scaled, hashes):
    """A bound of scaled + noise from above: -log(-log1p(-u)) <= -log(u), and a float's bits, as an integer, are at most
    2**23 * (log2 + 127). The half of the hash, rounded down, fits int32. What this adds is below 0.07."""
    half = ((hashes ^ -2147483648) >> 1) & 0x7FFFFFFF
    log2 = half.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 127.0  # 2**-23
    return scaled + ((31.0 - log2) * LOG2 + MARGIN)


@triton.jit
def _better(relative, is_token, temperature, inverse, bound, token_ids, lane, key0, key1, best, best_id):
    """Return the best score and its token, of those so far and of some more: scaled logits and noise are computed as they
    are defined only where a limit says that they can decide."""
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
    do_not_specialize=["splits", "num_logit_rows"],
    do_not_specialize_on_alignment=[
        "words",
        "tops",
        "counts",
        "heads",
        "head_ids",
        "laws",
        "places",
        "scores",
        "score_ids",
    ],
)
def choose_kernel(
    logits, stride, vocab, splits, words, num_logit_rows, tops, counts, heads, head_ids, room, laws, places, scores,
    score_ids, BLOCK: tl.constexpr,
):  # fmt: skip
    """(rows, splits): scores f32 and score_ids i32[splits, rows]: of rows with T > 0, the largest of scaled logits plus
    noise in each part, and its first place. Rows with top-k or top-p have laws, and those with places need only their heads
    to be looked at."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = row * splits + split
    temperature = _temperature(words, row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], NO_TOKEN, tl.int32)
    if temperature > 0:
        logit_row, bound = _logit_row(words, row), _log_min_p(words, row)
        base, top = logits + logit_row * stride, _top(tops, num_logit_rows, logit_row, splits)
        key0, key1 = _keys(words, row)
        lane, inverse = tl.arange(0, BLOCK), 1.0 / temperature
        in_heads = temperature < 0  # never, so far
        if (_top_k(words, row, vocab) > 0) | (_top_p(words, row) < 1):
            bound = tl.load(laws + row * 4 + 1).to(tl.float32)
            in_heads = tl.load(places + row) > 0
        if in_heads:
            count = tl.load(counts + part)
            for at in range(0, count, BLOCK):
                is_head = at + lane < count
                relative = tl.load(heads + part * room + at + lane, mask=is_head, other=float("-inf"))
                token_ids = tl.load(head_ids + part * room + at + lane, mask=is_head, other=0)
                best, best_id = _better(
                    relative, is_head, temperature, inverse, bound, token_ids, lane, key0, key1, best, best_id
                )
        else:
            for at in range(split * BLOCK, vocab, splits * BLOCK):
                token_ids = at + lane
                is_token = token_ids < vocab
                relative = _relative(base, token_ids, is_token, top)
                best, best_id = _better(
                    relative, is_token, temperature, inverse, bound, token_ids, lane, key0, key1, best, best_id
                )
    tl.store(scores + split * tl.num_programs(0) + row, best)
    tl.store(score_ids + split * tl.num_programs(0) + row, best_id)
