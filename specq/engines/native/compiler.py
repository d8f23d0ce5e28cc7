"""The C kernels of the engine's fast CPU path, built at first use; see `specq.runtime.compiler`.

An arithmetic (`specq.engines.arithmetic`) is a library of the same functions. To add one, add its C file to SOURCES.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from specq.engines.arithmetic import EXACT, INTEGER, ROUNDED
from specq.runtime import library

SOURCE = Path(__file__).parent / "kernels" / "forward.c"
SOURCES = {EXACT: SOURCE, ROUNDED: SOURCE, INTEGER: SOURCE.with_name("integer.c")}


def kernels(arithmetic: str = EXACT) -> ctypes.CDLL | None:
    """Return the compiled library, built if necessary; None if this machine cannot build it."""
    return library(SOURCES[arithmetic])


def built_kernels() -> str:
    """Return the library's name, which depends on its sources, compiler and processor; "" without a library."""
    library_here = kernels()
    return "" if library_here is None else Path(library_here._name).stem  # noqa: SLF001 - ctypes shows it nowhere else
