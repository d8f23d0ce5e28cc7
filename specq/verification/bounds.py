"""Top-k, top-p and min-p as one lower bound a row; `specq.verification.sampling` says what each means.

A full sort of a row costs more than all else in judging. Top-p's set is small as a rule, so only the HEAD largest
values of a row are looked at, on the host; a row that needs more is sorted whole, where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specq.params import SamplingParams
from specq.types import BoolArray, Float32Array

HEAD = 256
WIDE_ROWS = 64  # rows sorted at a time, to bound the memory that it takes


def lower_bounds(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> Float32Array:
    """Return f32[rows], on the host: the least of scaled logits f32[rows, vocab] that top-k, top-p and min-p keep."""
    with np.errstate(divide="ignore"):
        bounds = np.log(np.array([p.min_p for p in params], np.float32))
    ranked = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1]
    if not ranked:
        return bounds
    own = scaled if len(ranked) == len(params) else scaled[torch.tensor(ranked, device=scaled.device)]
    by_rank, is_known = _head_bounds(own, [params[row] for row in ranked], min(HEAD, scaled.shape[1]))
    rest = np.flatnonzero(~is_known)
    for part in np.array_split(rest, -(-len(rest) // WIDE_ROWS)) if len(rest) else ():
        rows = own[torch.from_numpy(part).to(own.device)]
        by_rank[part] = _wide_bounds(rows, [params[ranked[i]] for i in part])
    bounds[ranked] = np.maximum(bounds[ranked], by_rank)
    return bounds


def _head_bounds(scaled: torch.Tensor, params: Sequence[SamplingParams], width: int) -> tuple[Float32Array, BoolArray]:
    """Return (f32[rows], bool[rows]): the bounds of top-k and top-p, and whether `width` values a row sufficed."""
    head, vocab = _largest(scaled, width), scaled.shape[1]  # f32[rows, width], descending
    top_k = np.array([min(p.top_k or vocab, vocab) for p in params])
    top_p = np.array([p.top_p for p in params])
    row = np.arange(len(params))
    bounds = np.where(top_k < vocab, head[row, np.minimum(top_k, width) - 1], -np.inf).astype(np.float32)
    is_known = (top_k <= width) | (top_k == vocab)
    if (top_p < 1).any():
        total = _mass(scaled, head, bounds, top_k < vocab)
        num_below = (np.exp(head).cumsum(1, np.float64) < (top_p * total)[:, None]).sum(1)
        by_p = np.where(top_p < 1, head[row, np.minimum(num_below, width - 1)], -np.inf)
        # Values that tie with the k-th may go on behind the head, and belong to the mass.
        ends_inside = (top_k == vocab) | (bounds > head[:, -1])
        is_known &= (top_p == 1) | (ends_inside & (num_below < width))
        bounds = np.maximum(bounds, by_p).astype(np.float32)
    return bounds, is_known | (width == vocab)


def _wide_bounds(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> Float32Array:
    """Return f32[rows]: the bounds of top-k and top-p by sorting whole rows, where they lie."""
    vocab, device = scaled.shape[1], scaled.device
    top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    ordered = scaled.sort(dim=1, descending=True).values
    by_k = ordered.gather(1, top_k - 1)
    weights = torch.where(ordered >= by_k, ordered.exp(), 0).double().cumsum(1)
    num_below = (weights < top_p * weights[:, -1:]).sum(1, keepdim=True)
    by_p = ordered.gather(1, num_below.clamp(max=vocab - 1))
    bounds: Float32Array = torch.where(top_p < 1, by_k.maximum(by_p), by_k)[:, 0].cpu().numpy()
    return bounds


def _mass(
    scaled: torch.Tensor, head: Float32Array, bounds: Float32Array, has_top_k: BoolArray
) -> npt.NDArray[np.float64]:
    """Return f64[rows]: the mass, up to a factor, of what top-k kept."""
    of_head: npt.NDArray[np.float64] = np.where(head >= bounds[:, None], np.exp(head), 0).sum(1, np.float64)
    if has_top_k.all():
        return of_head
    of_all: npt.NDArray[np.float64] = scaled.exp().sum(1, dtype=torch.float64).cpu().numpy()
    return np.where(has_top_k, of_head, of_all)


def _largest(scaled: torch.Tensor, width: int) -> Float32Array:
    """Return f32[rows, width]: each row's largest values, descending. On a CPU NumPy's partition is ten times faster
    than torch.topk."""
    if scaled.device.type != "cpu":
        return scaled.topk(width, dim=1).values.cpu().numpy()
    vocab = scaled.shape[1]
    head = np.partition(scaled.numpy(), vocab - width, axis=1)[:, vocab - width :]
    head.sort(axis=1)
    return head[:, ::-1]
