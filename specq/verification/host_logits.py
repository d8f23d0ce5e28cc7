"""Logits of the host's memory are NumPy arrays, everywhere in the judge. Tensors are those of a GPU.

So a process that judges on a CPU needs no torch. Callers with tensors of a CPU pass the arrays that share their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specq.protocol import BoolArray, Float32Array

if TYPE_CHECKING:
    import torch

    Logits = Float32Array | torch.Tensor
else:
    Logits = Any


def on_host(logits: Logits) -> Logits:
    """Return logits of the host as float32 array, and a GPU's tensor unchanged.

    A float32 array and a CPU's float32 tensor are not copied. Tensors of devices without float64, which noise and
    distributions need, are copied to the host.
    """
    if isinstance(logits, np.ndarray):
        return logits if logits.dtype == np.float32 else logits.astype(np.float32)
    if logits.is_cuda:
        return logits
    values: Float32Array = logits.detach().float().cpu().numpy()
    return values


def without_bad_rows(logits: Logits) -> tuple[Float32Array, BoolArray, Logits]:
    """Return each row's highest logit, whether that is not a finite number, and the logits with zeros in these rows."""
    if isinstance(logits, np.ndarray):
        highest: Float32Array = logits.max(-1)  # a NaN is the largest of all
        is_bad = ~np.isfinite(highest)
        return highest, is_bad, np.where(is_bad[:, None], np.float32(0), logits)
    largest = logits.amax(-1).float()
    bad = ~largest.isfinite()
    return largest.cpu().numpy(), bad.cpu().numpy(), logits.masked_fill(bad[:, None], 0)
