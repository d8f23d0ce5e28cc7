"""The k largest scores of each row and their log-probabilities: in C on a CPU, by Triton on a GPU, else in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch

from specq.engines.torch.compiler import kernels
from specq.protocol import Float32Array, Int32Array, SamplingParams
from specq.verification.sampling import is_uncut, near_scores

FEW = 8  # tokens that one of the device's programs looks for, one after the other


def top_tokens(scores: torch.Tensor, count: int) -> tuple[Int32Array, Float32Array]:
    """Return token ids i32[rows, count], best first, and log_softmax(scores) there, f32[rows, count], on the host.

    scores [rows, vocab], count <= vocab. Where the log-probability is -inf, the token id means nothing.
    """
    if _is_fused(scores, count):
        from specq.engines.torch.fused_top import top_on_device

        return top_on_device(scores, count)
    library = kernels() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
    if library is None:
        return _top_by_torch(scores, count)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    num_rows, width = scores.shape
    token_ids, best = np.empty((num_rows, count), np.int32), np.empty((num_rows, count), np.float32)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (best, token_ids))
    stride = ctypes.c_long(scores.stride(0))
    library.specq_top(ctypes.c_void_p(scores.data_ptr()), stride, num_rows, width, count, *pointers)
    return token_ids, best


def rank_tokens(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    count: int,
    token_ids: Int32Array | None = None,
) -> tuple[Int32Array, Float32Array]:
    """Return `top_tokens` of the near scores (`specq.verification.sampling`) of logits [rows, vocab]: what the target
    is likely to draw at these positions. token_ids: the token of each column, where that is not its number."""
    if token_ids is not None:
        columns, log_probs = top_tokens(near_scores(logits, params, positions, token_ids), count)
        return token_ids.take(columns, mode="clip"), log_probs
    if _is_fused(logits, count):
        from specq.engines.torch.fused_top import rank_on_device

        if all(map(is_uncut, params)):
            return rank_on_device(logits, params, positions, count)
    return top_tokens(near_scores(logits, params, positions), count)


def _is_fused(scores: torch.Tensor, count: int) -> bool:
    is_nvidia = scores.device.type == "cuda" and torch.version.hip is None
    return is_nvidia and count <= FEW and find_spec("triton") is not None


def _top_by_torch(scores: torch.Tensor, count: int) -> tuple[Int32Array, Float32Array]:
    best, token_ids = scores.float().log_softmax(-1).topk(count)
    return token_ids.to(torch.int32).cpu().numpy(), best.cpu().numpy()
