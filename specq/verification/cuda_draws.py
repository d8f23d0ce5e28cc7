"""What the Triton kernels draw tokens with, as it lies in memory."""

from __future__ import annotations

import numpy as np

from specq.protocol import Float64Array, Int64Array
from specq.verification.target_rows import Distributions, Edits

# Of a draw: where its row lies in the logits, its edits, and what the row's weights follow from; gpu_kernels/draws.py
# reads words of 8 bytes. top and bound hold float32 values.
DRAW = np.dtype([
    ("logit_row", "<i8"),
    ("first_edit", "<i8"),
    ("end_edit", "<i8"),
    ("temperature", "<f8"),
    ("top", "<f8"),
    ("bound", "<f8"),
    ("uniform", "<f8"),
])  # fmt: skip
WORDS = DRAW.itemsize // 8


def draw_words(distributions: Distributions, which: Int64Array, edits: Edits, uniforms: Float64Array) -> Int64Array:
    """Return i64[n * WORDS + 2 * edits]: n of DRAW, then the edited tokens, then the bits of their weights; arguments
    as of `TargetRows.draw`."""
    rows, num, num_edits = distributions.rows, len(which), len(edits.place)
    words = np.empty(num * WORDS + 2 * num_edits, np.int64)
    draws, of_edits = words[: num * WORDS].view(DRAW), words[num * WORDS :]
    top, bound, mass, _ = distributions.found[which].T
    draws["logit_row"], draws["temperature"] = rows["logit_row"][which], rows["temperature"][which]
    draws["top"], draws["bound"], draws["uniform"] = top, bound, uniforms
    starts = edits.place.searchsorted(np.arange(num + 1))
    draws["first_edit"], draws["end_edit"] = starts[:-1], starts[1:]
    of_edits[:num_edits] = edits.token_ids
    of_edits[num_edits:].view(np.float64)[:] = edits.values * mass[edits.place]
    return words
