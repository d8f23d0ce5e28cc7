"""Applies the masks of grammars to logits on a device: by a Triton kernel, or with torch alone."""

from __future__ import annotations

import numpy as np
import torch

from specq.protocol import Int32Array, Int64Array
from specq.verification import cuda_rows
from specq.verification.transfers import to_device


@torch.inference_mode()  # the logits may be inference tensors
def mask_tensor(logits: torch.Tensor, rows: Int64Array, words: Int32Array) -> None:
    """See `specq.verification.masking.mask_rows`. This starts the work and does not wait."""
    if logits.is_cuda and logits.stride(-1) == 1 and cuda_rows.is_available():
        cuda_rows.mask_rows(logits, rows, words)
        return
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    index = to_device(rows, logits.device)
    is_forbidden = to_device(bits == 0, logits.device)
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill(is_forbidden, -torch.inf))
