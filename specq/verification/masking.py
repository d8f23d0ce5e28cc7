"""Applies the masks of grammars to target logits, in place: to arrays here, to tensors in `tensors`.

Masks come before all other parameters. So a grammar is a part of the target, and log-probabilities are those of the
masked distribution.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import Float32Array, Int32Array, Int64Array
from specq.verification import host_kernels
from specq.verification.host_logits import Logits
from specq.verification.judgements import places_in_runs
from specq.verification.packing import Placed


def mask(steps: Placed, logits: Logits) -> None:
    """Set the logits [rows, vocab] of forbidden tokens to -inf, for the steps with a grammar.

    On a device this starts the work and does not wait.
    """
    if steps.batch.masks is None:
        return
    places, counts, words = steps.batch.masks.of(steps.batch)
    rows = steps.first_rows[places]
    if len(words) > len(places):
        rows = rows.repeat(counts) + places_in_runs(counts)
    if len(places):
        mask_rows(logits, rows, words)


def mask_rows(logits: Logits, rows: Int64Array, words: Int32Array) -> None:
    """Set the logits of forbidden tokens to -inf, in the rows i64[n] with masks i32[n, words]."""
    if isinstance(logits, np.ndarray):
        _mask_on_host(logits, rows, np.ascontiguousarray(words))
        return
    from specq.verification.tensors import mask_tensor

    mask_tensor(logits, rows, words)


def _mask_on_host(logits: Float32Array, rows: Int64Array, words: Int32Array) -> None:
    masks, vocab = host_kernels.masks(), logits.shape[1]
    if masks is not None and logits.strides[1] == logits.itemsize:
        shape = logits.strides[0] // 4, vocab, len(rows)
        masks(logits.ctypes.data, *shape, rows.ctypes.data, words.ctypes.data, words.shape[1])
        return
    for row, own in zip(rows.tolist(), words, strict=True):
        bits = np.unpackbits(own.view(np.uint8), count=vocab, bitorder="little")
        np.copyto(logits[row], np.float32(-np.inf), where=bits == 0)
