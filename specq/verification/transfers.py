"""Transfers of arrays between host and GPU that let neither wait longer than necessary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy values to the device without waiting for its earlier work. Pageable memory could need that."""
    import torch

    found = torch.from_numpy(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


class Fetched:
    """A tensor's values on their way to the host. The copy starts as soon as the device has them."""

    def __init__(self, found: torch.Tensor) -> None:
        import torch

        on_gpu = found.is_cuda
        self._values = torch.empty(found.shape, dtype=found.dtype, pin_memory=on_gpu)
        self._values.copy_(found, non_blocking=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(found.device))

    def wait(self) -> npt.NDArray[Any]:
        """Return the values once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: npt.NDArray[Any] = self._values.numpy()
        return values
