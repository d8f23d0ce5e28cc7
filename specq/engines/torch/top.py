"""The k largest scores of each row and their log-probabilities on a device, in Triton or torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch

from specq.engines.native.top import Top
from specq.engines.torch.row_noise import RowNoise, Sampling, noise_of
from specq.protocol import Int32Array, SamplingParams
from specq.verification.sampling import perturbed_scores

FEW = 16  # most tokens that one GPU program searches for, one after another


def rank_on_device(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    count: int,
    token_ids: Int32Array | None = None,
) -> Top:
    """Return `specq.engines.models.rank_tokens` of tensors."""
    sampling = [Sampling.of(own) for own in params]
    if _is_fused(logits, count) and all(own.is_free for own in sampling):
        inverse, keys = noise_of(sampling, np.array(positions)[:, None])
        noise = RowNoise(*(torch.from_numpy(array).to(logits.device) for array in (inverse, keys[:, 0])))
        names = None if token_ids is None else torch.from_numpy(token_ids).to(logits.device)
        return _to_host(*rank_rows(logits, noise, count, names))
    scores = perturbed_scores(logits, params, positions, token_ids)
    columns, log_probs = _to_host(*_top_on_device(scores, None, count))
    return (columns if token_ids is None else token_ids.take(columns, mode="clip")), log_probs


def rank_rows(
    logits: torch.Tensor, noise: RowNoise, count: int, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `rank_tokens` on the device, i32 and f32 [rows, count].

    No data is copied to the host, so a CUDA graph may contain it. token_ids, i32[columns], are on the device.
    """
    columns, log_probs = _top_on_device(logits, noise, count, token_ids)
    if token_ids is None:
        return columns, log_probs
    return token_ids[columns.long().clamp(0, len(token_ids) - 1)], log_probs


def _top_on_device(
    scores: torch.Tensor, noise: RowNoise | None, count: int, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if _is_fused(scores, count):
        from specq.engines.torch.cuda.top import top_of_tiles

        return top_of_tiles(scores, noise, count, token_ids)
    scores = scores.float() if noise is None else noise.perturbed(scores, token_ids)
    best, columns = scores.log_softmax(-1).topk(count)
    return columns.to(torch.int32), best


def _is_fused(scores: torch.Tensor, count: int) -> bool:
    is_nvidia = scores.device.type == "cuda" and torch.version.hip is None
    return is_nvidia and count <= FEW and find_spec("triton") is not None


def _to_host(token_ids: torch.Tensor, log_probs: torch.Tensor) -> Top:
    return token_ids.cpu().numpy(), log_probs.cpu().numpy()
