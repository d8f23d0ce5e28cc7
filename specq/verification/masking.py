"""Applies the masks of grammars to target logits, in place: to arrays here, to tensors in `tensor_masking`.

Masks come before all other parameters. So a grammar is a part of the target, and log-probabilities are those of the
masked distribution.
"""

from __future__ import annotations

import ctypes

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
    if len(places):
        mask_rows(logits, steps.first_rows[places].repeat(counts) + places_in_runs(counts), words)


def mask_rows(logits: Logits, rows: Int64Array, words: Int32Array) -> None:
    """Set the logits of forbidden tokens to -inf, in the rows i64[n] with masks i32[n, words]."""
    if isinstance(logits, np.ndarray):
        _mask_on_host(logits, rows, np.ascontiguousarray(words))
        return
    from specq.verification.tensor_masking import mask_tensor

    mask_tensor(logits, rows, words)


def _mask_on_host(logits: Float32Array, rows: Int64Array, words: Int32Array) -> None:
    library, vocab = host_kernels.kernels(), logits.shape[1]
    if library is not None and logits.strides[1] == logits.itemsize:
        pointers = (ctypes.c_void_p(rows.ctypes.data), ctypes.c_void_p(words.ctypes.data))
        shape = ctypes.c_long(logits.strides[0] // 4), vocab, len(rows)
        library.specq_mask(ctypes.c_void_p(logits.ctypes.data), *shape, *pointers, ctypes.c_long(words.shape[1]))
        return
    for row, own in zip(rows.tolist(), words, strict=True):
        bits = np.unpackbits(own.view(np.uint8), count=vocab, bitorder="little")
        np.copyto(logits[row], np.float32(-np.inf), where=bits == 0)
