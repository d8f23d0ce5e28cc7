"""Compiles the judging kernels in another process while this one loads a model. Triton then finds them in its cache.

Triton can compile for a device without having it. If a kernel cannot be compiled this way, it is compiled at its first
use.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

PADDING = 64  # in vLLM, the number of columns of a head's weights is a multiple of this


def begin(vocab_size: int, dtype: str, capability: int) -> subprocess.Popen[bytes] | None:
    """Start to compile the kernels that judge logits [.., vocab_size] of this dtype on such a device.

    `capability`: the device's compute capability, for example 90. The process ends by itself, and the caller must reap
    it. Return None if Triton is not installed.
    """
    if find_spec("triton") is None:
        return None
    arguments = str(vocab_size), dtype, str(capability)
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def pretend_device(capability: int) -> None:
    """Make Triton compile for such a device in this process, without launching kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Pretended:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: Any = None) -> int:
            return 0

    driver.set_active(Pretended())

    def compile_only(self: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.warmup(*arguments, grid=grid, **options)

        return launch

    JITFunction.__getitem__ = compile_only


def compile_judging(vocab_size: int, dtype: str, capability: int) -> None:
    """Compile for a pretended device."""
    import torch

    from specq.verification import cuda_rows

    pretend_device(capability)

    def zeros(_self: object, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)  # kernels do not fill it, and it must hold numbers

    cuda_rows.CudaRows.empty = zeros  # type: ignore[assignment,method-assign]
    width = -(-vocab_size // PADDING) * PADDING
    cuda_rows.warm_up(torch.zeros(1, width, dtype=getattr(torch, dtype))[:, :vocab_size])


if __name__ == "__main__":
    compile_judging(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
