"""What the kernels have in common: the fields of rows, as ROW of `specq.verification.packing` lies in memory, in words
of 8 bytes, and their logits."""

# Triton's decorator and types are unknown to mypy, which sees no such package on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

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
    """0 for none."""
    top_k = tl.load(words + row * 6 + 3)
    return tl.where(top_k < vocab, top_k, 0)


@triton.jit
def top_of(tops, num_logit_rows, logit_row, splits):
    """The largest logit of a row; NaN if a split found one."""
    split = tl.arange(0, MAX_SPLITS)
    parts = tl.load(tops + split * num_logit_rows + logit_row, mask=split < splits, other=float("-inf"))
    is_nan = tl.max((parts != parts).to(tl.int32), 0)
    return tl.where(is_nan > 0, float("nan"), tl.max(parts, 0))


@triton.jit
def relative_logits(base, token_ids, is_token, top):
    """Logits f32 of some tokens of a row relative to its largest, -inf where there is none. Divided by T, with correct
    rounding, they are the scaled logits; that is slow, and done only where it can decide."""
    return tl.load(base + token_ids, mask=is_token, other=float("-inf")).to(tl.float32) - top


@triton.jit
def probs_of(logits, stride, vocab, words, distributions, row, token_ids):
    """The probabilities f64 of tokens in a row, or each in a row of its own, whose distributions f64[rows, 4] are
    known; 0 for what is no token, such as -1."""
    is_token = (token_ids >= 0) & (token_ids < vocab)
    found = distributions + row * 4
    base, top = logits + logit_row_of(words, row) * stride, tl.load(found).to(tl.float32)
    scaled = tl.div_rn(relative_logits(base, token_ids, is_token, top), temperature_of(words, row))
    is_kept = is_token & (scaled >= tl.load(found + 1).to(tl.float32))
    return tl.where(is_kept, tl.exp(scaled.to(tl.float64)), 0.0) / tl.load(found + 2)
