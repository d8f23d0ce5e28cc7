"""The k largest scores of each row and their log-probabilities: in C for arrays, else by `specq.engines.torch.top`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from specq.engines.native.compiler import kernels
from specq.protocol import Float32Array, Int32Array, SamplingParams
from specq.verification.host_logits import Logits, on_host
from specq.verification.logprobs import likeliest, log_mass
from specq.verification.sampling import near_scores

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


def rank_tokens(
    logits: Logits,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    count: int,
    token_ids: Int32Array | None = None,
) -> Top:
    """Return `top_tokens` of the near scores of logits [rows, vocab] (`specq.verification.sampling`), on the host.

    These are the tokens that the target is likely to sample at these positions. token_ids: the token of each column, if
    that is not the column number.
    """
    logits = on_host(logits)
    if not isinstance(logits, np.ndarray):
        from specq.engines.torch.top import rank_on_device

        return rank_on_device(logits, params, positions, count, token_ids)
    columns, log_probs = top_tokens(near_scores(logits, params, positions, token_ids), count)
    return (columns if token_ids is None else token_ids.take(columns, mode="clip")), log_probs
