"""The C kernels of the engine's fast CPU path, built at first use; see `specq.runtime.compiler`."""

from __future__ import annotations

import ctypes
from pathlib import Path

from specq.runtime import library

SOURCE = Path(__file__).parent / "kernels" / "forward.c"


def kernels() -> ctypes.CDLL | None:
    """Return the compiled library, built if need be; None if this machine cannot build it."""
    return library(SOURCE)
