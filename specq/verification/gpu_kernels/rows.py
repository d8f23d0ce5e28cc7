"""Shared functions of the kernels: the fields of rows, and their logits.

ROW of `specq.verification.host_kernels` defines the fields, in words of 8 bytes.
`chunks_kernel` and `draw_kernel` draw tokens from edited distributions by inversion. The first sums the weights of each
chunk of a row. The second finds the chunk that contains a row's uniform number, and the token there. DRAW of
`specq.verification.cuda_paths` defines the layout of a draw, in words of 8 bytes.

`mask_kernel` removes the tokens that a grammar forbids."""

from __future__ import annotations

import triton
import triton.language as tl

# Mypy does not know Triton's decorator and types, since the package is missing on a machine without a GPU.
# mypy: ignore-errors


NO_TOKEN = tl.constexpr(0x7FFFFFFF)
MAX_SPLITS = tl.constexpr(64)


@triton.jit
def logit_row_of(words, row):
    return tl.load(words + row * 6)


@triton.jit
def temperature_of(words, row):
    return tl.load(words.to(tl.pointer_type(tl.float32)) + row * 12 + 10)


@triton.jit
def log_min_p_of(words, row):
    return tl.load(words.to(tl.pointer_type(tl.float32)) + row * 12 + 11)


@triton.jit
def top_p_of(words, row):
    return tl.load(words.to(tl.pointer_type(tl.float64)) + row * 6 + 4)


@triton.jit
def top_k_of(words, row, vocab):
    """Return top_k, or 0 if it keeps all tokens."""
    top_k = tl.load(words + row * 6 + 3)
    return tl.where(top_k < vocab, top_k, 0)


@triton.jit
def top_of(tops, num_logit_rows, logit_row, splits):
    """Return the largest logit of a row. NaN if a split found one."""
    split = tl.arange(0, MAX_SPLITS)
    parts = tl.load(tops + split * num_logit_rows + logit_row, mask=split < splits, other=float("-inf"))
    is_nan = tl.max((parts != parts).to(tl.int32), 0)
    return tl.where(is_nan > 0, float("nan"), tl.max(parts, 0))


@triton.jit
def relative_logits(base, token_ids, is_token, top):
    """Return logits f32 of some tokens of a row relative to its largest. -inf for invalid tokens.

    Divided by T with correct rounding, they are the scaled logits. That is slow, and is done only if it can decide.
    """
    return tl.load(base + token_ids, mask=is_token, other=float("-inf")).to(tl.float32) - top


@triton.jit
def probs_of(logits, stride, vocab, words, distributions, row, token_ids):
    """Return the probabilities f64 of tokens in a row, or each in its own row. 0 for an invalid token, such as -1.

    The distributions f64[rows, 4] must be known.
    """
    is_token = (token_ids >= 0) & (token_ids < vocab)
    found = distributions + row * 4
    base, top = logits + logit_row_of(words, row) * stride, tl.load(found).to(tl.float32)
    scaled = tl.div_rn(relative_logits(base, token_ids, is_token, top), temperature_of(words, row))
    is_kept = is_token & (scaled >= tl.load(found + 1).to(tl.float32))
    return tl.where(is_kept, tl.exp(scaled.to(tl.float64)), 0.0) / tl.load(found + 2)


@triton.jit
def _span(vocab, num_chunks, BLOCK: tl.constexpr):
    """Return the number of tokens of a chunk, in whole blocks."""
    return tl.cdiv(tl.cdiv(vocab, BLOCK), num_chunks) * BLOCK


@triton.jit
def _weights(logits, stride, vocab, draws, edit_ids, edit_values, row, at, BLOCK: tl.constexpr):
    """Return f64[BLOCK]: the weights of the tokens from `at` on.

    The weight is exp(s) if s >= bound, else 0. The edits replace it for edited tokens.
    """
    words, numbers = draws + row * 7, draws.to(tl.pointer_type(tl.float64)) + row * 7
    temperature = tl.load(numbers + 3).to(tl.float32)
    top, bound = tl.load(numbers + 4).to(tl.float32), tl.load(numbers + 5).to(tl.float32)
    token_ids = at + tl.arange(0, BLOCK)
    is_token = token_ids < vocab
    scaled = tl.div_rn(relative_logits(logits + tl.load(words) * stride, token_ids, is_token, top), temperature)
    weights = tl.where(is_token & (scaled >= bound), tl.exp(scaled.to(tl.float64)), 0.0)
    for edit in range(tl.load(words + 1), tl.load(words + 2)):
        token_id = tl.load(edit_ids + edit)
        if (token_id >= at) & (token_id < at + BLOCK):
            weights = tl.where(token_ids == token_id, tl.load(edit_values + edit), weights)
    return weights


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["draws", "edit_ids", "edit_values", "sums"],
)
def chunks_kernel(logits, stride, vocab, splits, draws, edit_ids, edit_values, sums, BLOCK: tl.constexpr):
    """Grid (draws, chunks). Sum the weights of each chunk, sums f64[draws, chunks]. A chunk has consecutive tokens."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    span = _span(vocab, tl.num_programs(1), BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    for at in range(chunk * span, tl.minimum(chunk * span + span, vocab), BLOCK):
        mass += _weights(logits, stride, vocab, draws, edit_ids, edit_values, row, at, BLOCK)
    tl.store(sums + row * tl.num_programs(1) + chunk, tl.sum(mass, 0))


@triton.jit(
    do_not_specialize=["splits", "num_chunks"],
    do_not_specialize_on_alignment=["draws", "edit_ids", "edit_values", "sums", "chosen"],
)
def draw_kernel(
    logits, stride, vocab, splits, draws, edit_ids, edit_values, sums, num_chunks, chosen, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (draws). Draw a token for each, chosen i32[draws].

    It is the first token up to which the weights sum to more than the uniform number times all. The sum of a scan may
    be one last bit larger at a token without weight. So such a token is never chosen. If rounding leaves none, it is
    the last token with weight.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, MAX_SPLITS)
    masses = tl.load(sums + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    uniform = tl.load(draws.to(tl.pointer_type(tl.float64)) + row * 7 + 6)
    aim = uniform * tl.sum(masses, 0)
    own = tl.min(tl.where((masses > 0) & (tl.cumsum(masses, 0) > aim), chunk, NO_TOKEN), 0)
    own = tl.where(own < num_chunks, own, tl.max(tl.where(masses > 0, chunk, 0), 0))
    before = tl.sum(tl.where(chunk < own, masses, 0.0), 0)
    span = _span(vocab, num_chunks, BLOCK)
    token = tl.full([], NO_TOKEN, tl.int32)
    last = tl.zeros([], tl.int32)
    for at in range(own * span, tl.minimum(own * span + span, vocab), BLOCK):
        weights = _weights(logits, stride, vocab, draws, edit_ids, edit_values, row, at, BLOCK)
        token_ids = at + tl.arange(0, BLOCK)
        is_beyond = (weights > 0) & (before + tl.cumsum(weights, 0) > aim)
        token = tl.minimum(token, tl.min(tl.where(is_beyond, token_ids, NO_TOKEN), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, token_ids, 0), 0))
        before += tl.sum(weights, 0)
    tl.store(chosen + row, tl.where(token < vocab, token, last))


# Mypy does not know Triton's decorator and types, since the package is missing on a machine without a GPU.
# mypy: ignore-errors


@triton.jit
def mask_kernel(logits, stride, vocab, num_words, rows, masks, BLOCK: tl.constexpr):
    """Grid (rows, splits). Set the logits of forbidden tokens to -inf.

    `rows` i64[rows]: their places in the logits. `masks` i32[rows, num_words]: a bit for each token.
    Tokens without a bit are forbidden.
    """
    place, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place)
    words = masks + place.to(tl.int64) * num_words
    for at in range(split * BLOCK, vocab, tl.num_programs(1) * BLOCK):
        token_ids = at + tl.arange(0, BLOCK)
        is_in = token_ids < vocab
        word = tl.load(words + (token_ids >> 5), mask=is_in & ((token_ids >> 5) < num_words), other=0)
        is_forbidden = ((word >> (token_ids & 31)) & 1) == 0
        tl.store(logits + row * stride + token_ids, float("-inf"), mask=is_in & is_forbidden)
