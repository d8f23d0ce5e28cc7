"""The k best tokens of each row on a GPU, in two launches.

torch's log_softmax and topk read a wide row many times. At T > 0 a token's score is its logit / T plus the judge's
noise (`gpu_kernels.top`). The noise is made in the same pass.
"""

from __future__ import annotations

import torch
import triton

from specq.engines.torch.cuda.gpu_kernels.top import merge_kernel, tile_kernel
from specq.engines.torch.row_noise import RowNoise

TILE = 1024  # tokens


def top_of_tiles(
    scores: torch.Tensor, noise: RowNoise | None, count: int, token_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `top.rank_rows` for scores [rows, columns] on a device that Triton supports.

    Returns columns, not tokens. Without noise it ranks the scores themselves.
    """
    results = ranked_in_tiles(scores, noise, count, token_ids)
    return results[..., 0], results[..., 1].view(torch.float32)


def ranked_in_tiles(
    scores: torch.Tensor, noise: RowNoise | None, count: int, token_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return i32[rows, count, 2]: columns, and the bits of their log-probabilities.

    The noise may have fewer rows than the scores. Each noise row then serves an equal number of consecutive rows. The
    noise may also have keys i32[rows, n, 2]: each row's first key is used.
    """
    num_rows, num_tokens = scores.shape
    num_tiles = triton.cdiv(num_tokens, TILE)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    found = scores.new_empty(num_rows * num_tiles * count, dtype=torch.float64)
    ids = scores.new_empty(num_rows * num_tiles * count, dtype=torch.int32)
    sums = scores.new_empty(num_rows * num_tiles * 2, dtype=torch.float64)
    results = scores.new_empty(num_rows, count, 2, dtype=torch.int32)
    inverse, keys, share, stride = ids, ids, 1, 1
    if noise is not None:
        inverse, share = noise.inverse.contiguous(), num_rows // len(noise.inverse)
        keys = noise.keys if noise.keys.stride(-1) == 1 else noise.keys.contiguous()
        stride = keys.stride(0) // 2
    with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
        tile_kernel[(num_rows, num_tiles)](
            scores, scores.stride(0), num_tokens, inverse, keys, ids, found, ids, sums,
            ids if token_ids is None else token_ids, stride, share,
            NOISY=noise is not None, STEPPED=False, COUNT=count, BLOCK=TILE, PDL=False, NAMED=token_ids is not None,
            num_warps=4,
        )  # fmt: skip
        merge_kernel[(num_rows,)](
            found, ids, sums, num_tiles, results, ids, ids, ids, ids, ids, ids, 0,
            COUNT=count, WIDTH=triton.next_power_of_2(num_tiles * count), TILES_PAD=triton.next_power_of_2(num_tiles),
            CHAIN=False, MAX_STEPS=1, PDL=False, num_warps=4,
        )  # fmt: skip
    return results
