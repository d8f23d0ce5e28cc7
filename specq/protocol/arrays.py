"""Types of arrays, for all of specq, and the parts of arrays that hold something of one session after the other."""

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
    """Return i64[n + 1]: where each of n parts of these lengths begins, and where the last ends."""
    ends = np.zeros(len(counts) + 1, np.intp)
    counts.cumsum(dtype=np.intp, out=ends[1:])
    return ends


def spans_of(counts: Int32Array) -> list[slice]:
    """Return where each part of these lengths lies."""
    ends = ends_of_parts(counts).tolist()
    return list(map(slice, ends[:-1], ends[1:]))


def places_of(counts: Int32Array, parts: Sequence[int]) -> IntpArray:
    """Return the places of all elements of some parts, in the order of these."""
    starts, chosen = ends_of_parts(counts)[parts], counts[parts]
    ends = ends_of_parts(chosen)
    return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], chosen)
