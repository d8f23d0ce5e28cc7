"""The k best tokens of each row on a GPU, in two launches; torch's log_softmax and topk read a wide row many times."""

from __future__ import annotations

import numpy as np
import torch
import triton

from specq.engines.torch.gpu_kernels.top import merge_kernel, tile_kernel
from specq.types import Float32Array, Int32Array

TILE = 1024  # tokens


def top_on_device(scores: torch.Tensor, count: int) -> tuple[Int32Array, Float32Array]:
    """Return what `top.top_tokens` does, of scores [rows, vocab] on a device that Triton knows."""
    num_rows, num_tokens = scores.shape
    num_tiles = triton.cdiv(num_tokens, TILE)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    found = scores.new_empty(num_rows * num_tiles * count, dtype=torch.float64)
    ids = scores.new_empty(num_rows * num_tiles * count, dtype=torch.int32)
    sums = scores.new_empty(num_rows * num_tiles * 2, dtype=torch.float64)
    results = scores.new_empty(num_rows, count, 2, dtype=torch.int32)
    with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
        tile_kernel[(num_rows, num_tiles)](
            scores, scores.stride(0), num_tokens, scores, ids, ids, found, ids, sums,
            NOISY=False, MAX_STEPS=1, COUNT=count, BLOCK=TILE, PDL=False, num_warps=4,
        )  # fmt: skip
        merge_kernel[(num_rows,)](
            found, ids, sums, num_tiles, results, ids, ids, ids, ids, ids, ids, ids, 0,
            COUNT=count, WIDTH=triton.next_power_of_2(num_tiles * count), TILES_PAD=triton.next_power_of_2(num_tiles),
            CHAIN=False, MAX_STEPS=1, PDL=False, num_warps=4,
        )  # fmt: skip
        host = results.cpu().numpy()
    return host[..., 0].copy(), host[..., 1].copy().view(np.float32)
