"""`probs_kernel` looks up the probabilities of tokens in distributions that are known."""

# Triton's decorator and types are unknown to mypy, which sees no such package on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specq.verification.gpu_kernels.rows import logit_row_of, relative_logits, temperature_of


@triton.jit(
    do_not_specialize=["splits", "width"],
    do_not_specialize_on_alignment=["words", "distributions", "which", "asked", "probs"],
)
def probs_kernel(
    logits, stride, vocab, splits, words, distributions, which, asked, width, probs, BLOCK: tl.constexpr,
):  # fmt: skip
    """(n): probs f64[n, width], the probabilities of the tokens asked i64[n, width] in the rows which i64[n], with
    distributions f64[rows, 4] as in `Distributions`; 0 for what is no token, such as -1."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(which + place)
    base, temperature = logits + logit_row_of(words, row) * stride, temperature_of(words, row)
    top = tl.load(distributions + row * 4).to(tl.float32)
    bound = tl.load(distributions + row * 4 + 1).to(tl.float32)
    mass = tl.load(distributions + row * 4 + 2)
    lane = tl.arange(0, BLOCK)
    for at in range(0, width, BLOCK):
        is_asked = at + lane < width
        token_ids = tl.load(asked + place * width + at + lane, mask=is_asked, other=-1)
        is_token = (token_ids >= 0) & (token_ids < vocab)
        scaled = tl.div_rn(relative_logits(base, token_ids, is_token, top), temperature)
        weight = tl.where(is_token & (scaled >= bound), tl.exp(scaled.to(tl.float64)), 0.0)
        tl.store(probs + place * width + at + lane, weight / mass, mask=is_asked)
