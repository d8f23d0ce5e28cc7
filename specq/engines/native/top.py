"""The k largest scores of each row and their log-probabilities, in C or NumPy."""

from __future__ import annotations

import ctypes

import numpy as np

from specq.engines.native.compiler import kernels
from specq.protocol import Float32Array, Int32Array
from specq.verification.logprobs import likeliest, log_mass

Top = tuple[Int32Array, Float32Array]


def top_tokens(scores: Float32Array, count: int) -> Top:
    """Return the best tokens and their log-probabilities: i32 and f32 [rows, count], best first.

    The log-probabilities are log_softmax(scores). scores: f32[rows, vocab], count <= vocab. Where the log-probability
    is -inf, the token id has no meaning.
    """
    library = kernels()
    if library is None:
        columns = likeliest(scores, count)
        return columns.astype(np.int32), np.take_along_axis(scores, columns, 1) - log_mass(scores)
    scores = scores if scores.strides[1] == scores.itemsize else np.ascontiguousarray(scores)
    num_rows, width = scores.shape
    token_ids, best = np.empty((num_rows, count), np.int32), np.empty((num_rows, count), np.float32)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (best, token_ids))
    stride = ctypes.c_long(scores.strides[0] // scores.itemsize)
    library.specq_top(ctypes.c_void_p(scores.ctypes.data), stride, num_rows, width, count, *pointers)
    return token_ids, best
