"""Numbers between the host and a device, without waiting: integers there through pinned memory, results back behind an
event."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specq.protocol import Int32Array


class Inbox:
    """Host memory from which integers are copied to the device; it is not written again before that copy is done."""

    def __init__(self, length: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(length, dtype=torch.int32, pin_memory=on_gpu)
        self.array: Int32Array = self._memory.numpy()
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until `array` may be written."""
        if self._sent is not None:
            self._sent.synchronize()

    def copy(self, used: int, block: torch.Tensor) -> None:
        """Copy the first `used` of `array` to the device, without waiting."""
        block[:used].copy_(self._memory[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def fetch(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Begin to copy values to the host, whose memory on the device is free again for what is begun afterwards; return
    what waits for the copy and gives it."""
    on_gpu = values.is_cuda
    found = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
    found.copy_(values, non_blocking=on_gpu)
    if not on_gpu:
        return found.numpy
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(values.device))

    def wait() -> np.ndarray:
        arrived.synchronize()
        return found.numpy()

    return wait
