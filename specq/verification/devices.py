"""Chooses the implementation of `TargetRows` by the device of the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specq.protocol import EngineLostError
from specq.verification import host_kernels, host_rows
from specq.verification.host_logits import Logits, on_host
from specq.verification.target_rows import TargetRows

if TYPE_CHECKING:
    import torch


def warm_up(logits: Logits) -> None:
    """Compile the kernels for judging such logits in advance. It takes seconds without a cache."""
    if isinstance(logits, np.ndarray) or not logits.is_cuda:
        return
    from specq.verification import cuda_rows

    if cuda_rows.is_available():
        cuda_rows.warm_up(logits)


def target_rows(logits: Logits) -> TargetRows:
    """Return the implementation for logits [rows, vocab] of any float type, on their device.

    On a host that cannot build the kernels, torch computes.
    """
    logits = on_host(logits)
    if isinstance(logits, np.ndarray) and (library := host_kernels.kernels()) is not None:
        return host_rows.HostRows(logits, library)
    import torch

    from specq.verification import cuda_rows
    from specq.verification.torch_rows import TorchRows

    if isinstance(logits, np.ndarray):
        return TorchRows(torch.from_numpy(logits))
    return cuda_rows.CudaRows(logits) if cuda_rows.is_available() else TorchRows(logits)


def device_of(logits: Logits) -> torch.device | None:
    """Return the GPU that has the logits. None: the host."""
    return None if isinstance(logits, np.ndarray) else logits.device


def check_alive(device: torch.device | None) -> None:
    """Check that the device still works in this process. CUDA, for example, does not after a failed assertion.

    Raises EngineLostError if it does not. Call this after an error and before a retry. An error of the device does not
    come from a session.
    """
    if device is None or device.type != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise EngineLostError(
            f"the device {device} failed, and stays unusable until the process ends: {reason}"
        ) from error
