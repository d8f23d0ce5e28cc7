"""`mask_kernel` removes the tokens that a grammar forbids."""

# Mypy does not know Triton's decorator and types, since the package is missing on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["masks"])
def mask_kernel(logits, stride, vocab, num_rows, num_words, masks, BLOCK: tl.constexpr):
    """Grid (rows, splits). Set the logits of forbidden tokens to -inf.

    `masks` i32[rows + rows * words]: the places of the rows in the logits, then a bit for each token. Tokens without a
    bit are forbidden.
    """
    place, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(masks + place).to(tl.int64)
    words = masks + num_rows + place.to(tl.int64) * num_words
    for at in range(split * BLOCK, vocab, tl.num_programs(1) * BLOCK):
        token_ids = at + tl.arange(0, BLOCK)
        is_in = token_ids < vocab
        word = tl.load(words + (token_ids >> 5), mask=is_in & ((token_ids >> 5) < num_words), other=0)
        is_forbidden = ((word >> (token_ids & 31)) & 1) == 0
        tl.store(logits + row * stride + token_ids, float("-inf"), mask=is_in & is_forbidden)
