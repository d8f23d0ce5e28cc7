"""The C kernels of the engine's fast CPU path, built at first use; see `specq.runtime.compiler`.

Each arithmetic names what becomes of a GGUF file's values, and its library of the same functions.

- exact: products of floats, of exactly the file's values.
- rounded: the same of values rounded to bfloat16, half the bytes of float32. Jobs of versions before 0.3 may need it.
- integer: products of the file's own blocks with activations in 8 bits.

To add one, add its C file to SOURCES.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from specq.engines.native_spec import ARITHMETICS
from specq.runtime import library

SOURCE = Path(__file__).parent / "kernels" / "forward.c"
AUTO, EXACT, ROUNDED, INTEGER = ARITHMETICS
SOURCES = {EXACT: SOURCE, ROUNDED: SOURCE, INTEGER: SOURCE.with_name("integer.c")}


def kernels(arithmetic: str = EXACT) -> ctypes.CDLL | None:
    """Return the compiled library, built if necessary; None if this machine cannot build it."""
    return library(SOURCES[arithmetic])


def built_kernels() -> str:
    """Return the library's name, which depends on its sources, compiler and processor; "" without a library."""
    library_here = kernels()
    return "" if library_here is None else Path(library_here._name).stem  # noqa: SLF001 - ctypes shows it nowhere else
