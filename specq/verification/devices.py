"""Which implementation of `TargetRows` answers for logits on which device."""

from __future__ import annotations

import torch

from specq.protocol import EngineLostError
from specq.verification import cuda_rows, host_kernels, host_rows
from specq.verification.target_rows import TargetRows
from specq.verification.torch_rows import TorchRows


def warm_up(logits: torch.Tensor) -> None:
    """Compile what judging logits like these takes, so that no session waits for it; seconds, where no cache has it."""
    if logits.is_cuda and cuda_rows.is_available():
        cuda_rows.warm_up(logits)


def target_rows(logits: torch.Tensor) -> TargetRows:
    """Return what answers for logits [rows, vocab] of any float type, where they lie."""
    if logits.is_cpu and (library := host_kernels.kernels()) is not None:
        return host_rows.HostRows(logits, library)
    if logits.is_cuda and cuda_rows.is_available():
        return cuda_rows.CudaRows(logits)
    return TorchRows(logits)


def check_alive(device: torch.device) -> None:
    """Raise EngineLostError if the device can do nothing more in this process, as CUDA after a failed assertion.

    To be asked after an error, before anything is tried again: an error of the device is not one session's.
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
