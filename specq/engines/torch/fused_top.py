"""The k best tokens of each row on a GPU, in two launches; torch's log_softmax and topk read a wide row many times.

At T > 0 a token's score is its logit over T plus the noise that the judge will add (`gpu_kernels.top`), made in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from specq.engines.torch.gpu_kernels.top import merge_kernel, tile_kernel
from specq.protocol import Float32Array, Int32Array, SamplingParams
from specq.verification.noise import Domain, row_keys

TILE = 1024  # tokens


def top_on_device(scores: torch.Tensor, count: int) -> tuple[Int32Array, Float32Array]:
    """Return what `top.top_tokens` does, of scores [rows, vocab] on a device that Triton knows."""
    return _top(scores, count, None)


def rank_on_device(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], count: int
) -> tuple[Int32Array, Float32Array]:
    """Return what `top.rank_tokens` does, for parameters that are all `is_uncut`."""
    temperatures = [p.temperature for p in params]
    if not any(temperatures):
        return _top(logits, count, None)
    inverse = [1 / t if t > 0 else 0 for t in temperatures]
    keys = row_keys([p.seed for p in params], positions, Domain.GUMBEL)
    steps = np.zeros(len(params), np.int32)  # which of a row's keys
    sampling = np.concatenate([np.array(inverse, np.float32).view(np.int32), steps, keys.reshape(-1)])
    return _top(logits, count, torch.from_numpy(sampling).to(logits.device, non_blocking=True))


def _top(scores: torch.Tensor, count: int, sampling: torch.Tensor | None) -> tuple[Int32Array, Float32Array]:
    num_rows, num_tokens = scores.shape
    num_tiles = triton.cdiv(num_tokens, TILE)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    found = scores.new_empty(num_rows * num_tiles * count, dtype=torch.float64)
    ids = scores.new_empty(num_rows * num_tiles * count, dtype=torch.int32)
    sums = scores.new_empty(num_rows * num_tiles * 2, dtype=torch.float64)
    results = scores.new_empty(num_rows, count, 2, dtype=torch.int32)
    inverse = steps = keys = ids
    if sampling is not None:
        inverse, steps, keys = sampling.split([num_rows, num_rows, 2 * num_rows])  # type: ignore[no-untyped-call]
        inverse = inverse.view(torch.float32)
    with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
        tile_kernel[(num_rows, num_tiles)](
            scores, scores.stride(0), num_tokens, inverse, keys, steps, found, ids, sums,
            NOISY=sampling is not None, MAX_STEPS=1, COUNT=count, BLOCK=TILE, PDL=False, num_warps=4,
        )  # fmt: skip
        merge_kernel[(num_rows,)](
            found, ids, sums, num_tiles, results, ids, ids, ids, ids, ids, ids, ids, 0,
            COUNT=count, WIDTH=triton.next_power_of_2(num_tiles * count), TILES_PAD=triton.next_power_of_2(num_tiles),
            CHAIN=False, MAX_STEPS=1, PDL=False, num_warps=4,
        )  # fmt: skip
        host = results.cpu().numpy()
    return host[..., 0].copy(), host[..., 1].copy().view(np.float32)
