"""The C kernels of kernels/rows.c: for target logits on a CPU, for draws, and for walks down drafted trees. No
torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from specq.runtime import library

SOURCE = Path(__file__).parent / "kernels" / "rows.c"


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the compiled library; None if this machine cannot build it."""
    return library(SOURCE)


@cache
def near_scores() -> Any:
    """Return `specq_near_scores` (kernels/guess.h) with its types, for Python and for other C; None as for
    `kernels`."""
    found = kernels()
    if found is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function = found.specq_near_scores
    function.argtypes = [pointer, number, ctypes.c_int, ctypes.c_int, pointer, pointer, number, pointer]
    function.restype = None
    return function
