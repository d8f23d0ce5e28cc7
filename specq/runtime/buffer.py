"""Arrays whose addresses are known, for calls of C: to ask NumPy for an address takes longer than to copy some hundred
numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LEAST = 64  # places


class Buffer:
    """An array that grows, and its address."""

    __slots__ = ("address", "array")

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.array: npt.NDArray[Any] = np.empty(0, dtype)
        self.address = 0

    def room(self, size: int) -> npt.NDArray[Any]:
        """Return the first `size` places; where there are not as many yet, what was there is lost."""
        if size > len(self.array) or not self.address:
            self.array = np.empty(max(LEAST, 2 * size), self.array.dtype)
            self.address = self.array.ctypes.data
        return self.array[:size]

    def take(self, values: npt.ArrayLike, size: int) -> int:
        """Copy values in; return the address."""
        self.room(size)[:] = values
        return self.address
