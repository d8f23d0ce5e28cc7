"""Which implementation of `TargetRows` answers for logits on which device."""

from __future__ import annotations

import torch

from specq.verification import cuda_rows, host_rows
from specq.verification.target_rows import TargetRows
from specq.verification.torch_rows import TorchRows


def warm_up(logits: torch.Tensor) -> None:
    """Compile what judging logits like these takes, so that no session waits for it; seconds, where no cache has it."""
    if logits.is_cuda and cuda_rows.is_available():
        cuda_rows.warm_up(logits)


def target_rows(logits: torch.Tensor) -> TargetRows:
    """Return what answers for logits [rows, vocab] of any float type, where they lie."""
    if logits.is_cpu and (library := host_rows.kernels()) is not None:
        return host_rows.HostRows(logits, library)
    if logits.is_cuda and cuda_rows.is_available():
        return cuda_rows.CudaRows(logits)
    return TorchRows(logits)
