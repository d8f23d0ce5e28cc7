"""Triton kernels for each row's best tokens, with the same noise as the judge.

The score is the logit at temperature 0, else logit / T + Gumbel noise of (seed, position, token). This equals
`specq.verification.sampling` without top-k, top-p or min-p. It is computed in float64, so that the two differ only by
rounding. The first kernel finds the best of each tile of the vocabulary. The second finds the best over all tiles. In a
chain of draft steps it also advances the batch. So the next step can run without the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NEVER = -1.0e300  # the score of columns without a token


@triton.jit
def _gumbel(token_ids, key0, key1):
    """Return the noise of `specq.verification.noise.gumbel`, in float64; token_ids and keys int32."""
    x = token_ids * -1640531535 + key0
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x7FEB352D
    x += key1
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261
    x ^= (x >> 16) & 0xFFFF
    uniform = (x.to(tl.float64) + 2147483648.5) * 2.3283064365386963e-10  # 2**-32
    return -tl.log(-tl.log(1.0 - uniform))


@triton.jit(
    do_not_specialize=["max_steps", "share"], do_not_specialize_on_alignment=["inverse_temperatures_ptr", "keys_ptr"]
)
def tile_kernel(
    logits_ptr, stride, num_tokens, inverse_temperatures_ptr, keys_ptr, steps_ptr, scores_ptr, ids_ptr, sums_ptr,
    names_ptr, max_steps, share,
    NOISY: tl.constexpr, STEPPED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    NAMED: tl.constexpr,
):  # fmt: skip
    """Find the COUNT best scores of a tile, and its part of the softmax's sum. Program (row, tile).

    - logits: [rows, stride]. The first num_tokens columns count.
    - share: this number of consecutive rows has the same noise.
    - inverse_temperatures: f32[rows / share], 0 at temperature 0.
    - keys: i32[rows / share, max_steps, 2]. With STEPPED, steps i32[rows / share] selects the key, else the first is
      used.
    - scores: f64, ids: i32, both [rows, tiles, COUNT].
    - sums: f64[rows, tiles, 2], largest score, sum of exp(score - largest).
    - names: with NAMED, i32[num_tokens], the tokens of the columns, which determine the noise. ids are still columns.
    """
    row, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tile * BLOCK + tl.arange(0, BLOCK)
    real = token < num_tokens
    score = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=real, other=0.0).to(tl.float64)
    if NOISY:
        sharing = row // share
        inverse_temperature = tl.load(inverse_temperatures_ptr + sharing)
        if inverse_temperature > 0:
            step = tl.load(steps_ptr + sharing) if STEPPED else 0
            at = keys_ptr + (sharing * max_steps + step) * 2
            name = tl.load(names_ptr + token, mask=real, other=0) if NAMED else token
            score = score * inverse_temperature.to(tl.float64) + _gumbel(name, tl.load(at), tl.load(at + 1))
    score = tl.where(real, tl.maximum(score, -1.0e300), -1.0e300)  # the sampler gives excluded tokens -inf
    best = tl.max(score, 0)
    total = tl.sum(tl.where(real, tl.exp((score - best).to(tl.float32)), 0.0), 0)
    at_tile = row * tiles + tile
    tl.store(sums_ptr + at_tile * 2, best)
    tl.store(sums_ptr + at_tile * 2 + 1, total.to(tl.float64))
    for rank in tl.static_range(COUNT):
        best = tl.max(score, 0)
        chosen = tl.min(tl.where(score == best, token, 2147483647), 0)
        tl.store(scores_ptr + at_tile * COUNT + rank, best)
        tl.store(ids_ptr + at_tile * COUNT + rank, chosen)
        score = tl.where(token == chosen, -1.0e300, score)


@triton.jit
def merge_kernel(
    scores_ptr, ids_ptr, sums_ptr, tiles, out_ptr,
    steps_ptr, token_ids_ptr, positions_ptr, slots_ptr, lengths_ptr, next_slots_ptr, num_slots,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, TILES_PAD: tl.constexpr, CHAIN: tl.constexpr, MAX_STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Find the COUNT best of all tiles, as i32[steps, rows, COUNT, 2]: token id, bits of its log-probability.

    Program row. With CHAIN, the row's best token becomes its next input. It is one position further, in a slot from
    next_slots [rows, MAX_STEPS]. It sees one position more. WIDTH >= tiles * COUNT and TILES_PAD >= tiles are powers
    of two.
    """
    row, rows = tl.program_id(0), tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    step = tl.load(steps_ptr + row) if CHAIN else 0
    tile = tl.arange(0, TILES_PAD)
    largest = tl.load(sums_ptr + (row * tiles + tile) * 2, mask=tile < tiles, other=-1.0e300)
    sums = tl.load(sums_ptr + (row * tiles + tile) * 2 + 1, mask=tile < tiles, other=0.0)
    top = tl.max(largest, 0)
    total = tl.log(tl.sum(sums * tl.exp((largest - top).to(tl.float32)), 0))
    index = tl.arange(0, WIDTH)
    real = index < tiles * COUNT
    score = tl.load(scores_ptr + row * tiles * COUNT + index, mask=real, other=-1.0e300)
    ids = tl.load(ids_ptr + row * tiles * COUNT + index, mask=real, other=2147483647)
    out = out_ptr + (step * rows + row) * COUNT * 2
    for rank in tl.static_range(COUNT):
        best = tl.max(score, 0)
        chosen = tl.min(tl.where(score == best, ids, 2147483647), 0)
        log_prob = tl.where(best > -1.0e299, (best - top - total).to(tl.float32), float("-inf"))
        tl.store(out + rank * 2, chosen)
        tl.store(out + rank * 2 + 1, log_prob.to(tl.int32, bitcast=True))
        if CHAIN and rank == 0:
            tl.store(token_ids_ptr + row, chosen)
        score = tl.where((ids == chosen) & (score == best), -1.0e300, score)
    if CHAIN:
        tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
        tl.store(slots_ptr + row, tl.load(next_slots_ptr + row * MAX_STEPS + step, mask=step < num_slots, other=-1))
        tl.store(lengths_ptr + row, tl.load(lengths_ptr + row) + 1)
        tl.store(steps_ptr + row, step + 1)
