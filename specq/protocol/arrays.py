"""Types of arrays for all of specq, and offsets in arrays that hold the values of several sessions in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]
UInt16Array = npt.NDArray[np.uint16]
UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntpArray = npt.NDArray[np.intp]
Float16Array = npt.NDArray[np.float16]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def ends_of_parts(counts: npt.NDArray[np.integer[Any]]) -> IntpArray:
    """Return i64[n + 1]: the start of each of n parts with these lengths, and the end of the last."""
    ends = np.zeros(len(counts) + 1, np.intp)
    counts.cumsum(dtype=np.intp, out=ends[1:])
    return ends


def spans_of(counts: Int32Array) -> list[slice]:
    """Return a slice for each part with these lengths."""
    ends = ends_of_parts(counts).tolist()
    return list(map(slice, ends[:-1], ends[1:]))


def places_of(counts: Int32Array, parts: Sequence[int]) -> IntpArray:
    """Return the indices of all elements of the chosen parts, in the order of `parts`."""
    starts, chosen = ends_of_parts(counts)[parts], counts[parts]
    ends = ends_of_parts(chosen)
    return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], chosen)
