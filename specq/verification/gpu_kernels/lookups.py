"""`probs_kernel` looks up the probabilities of tokens in distributions that are known."""

# Triton's decorator and types are unknown to mypy, which sees no such package on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specq.verification.gpu_kernels.rows import probs_of


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
    lane = tl.arange(0, BLOCK)
    for at in range(0, width, BLOCK):
        is_asked = at + lane < width
        token_ids = tl.load(asked + place * width + at + lane, mask=is_asked, other=-1)
        found = probs_of(logits, stride, vocab, words, distributions, row, token_ids)
        tl.store(probs + place * width + at + lane, found, mask=is_asked)
