"""Chooses the implementation of `TargetRows` by the device of the logits."""

from __future__ import annotations

import torch

from specq.protocol import EngineLostError
from specq.verification import cuda_rows, host_kernels, host_rows
from specq.verification.target_rows import TargetRows
from specq.verification.torch_rows import TorchRows


def warm_up(logits: torch.Tensor) -> None:
    """Compile the kernels for judging such logits in advance. It takes seconds without a cache."""
    if logits.is_cuda and cuda_rows.is_available():
        cuda_rows.warm_up(logits)


def target_rows(logits: torch.Tensor) -> TargetRows:
    """Return the implementation for logits [rows, vocab] of any float type, on their device."""
    if logits.is_cpu and (library := host_kernels.kernels()) is not None:
        return host_rows.HostRows(logits, library)
    if logits.is_cuda and cuda_rows.is_available():
        return cuda_rows.CudaRows(logits)
    return TorchRows(logits)


def check_alive(device: torch.device) -> None:
    """Check that the device still works in this process. CUDA, for example, does not after a failed assertion.

    Raises EngineLostError if it does not. Call this after an error and before a retry. An error of the device does not
    come from a session.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise EngineLostError(
            f"the device {device} failed, and stays unusable until the process ends: {reason}"
        ) from error
