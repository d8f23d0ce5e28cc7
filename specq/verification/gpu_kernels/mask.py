"""`mask_kernel` removes the tokens that a grammar forbids."""

# Mypy does not know Triton's decorator and types, since the package is missing on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


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
