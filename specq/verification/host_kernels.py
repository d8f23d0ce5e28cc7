"""The C kernels of kernels/rows.c: for target logits on a CPU, for draws, and for walks down drafted trees. No torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from specq.runtime import library

SOURCE = Path(__file__).parent / "kernels" / "rows.c"


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the compiled library; None if this machine cannot build it."""
    return library(SOURCE)
