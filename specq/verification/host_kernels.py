"""The C kernels of kernels/rows.c: target logits on a CPU, draws, and walks down drafted trees. No torch.

This module also defines a row: the numbers that a row of target logits is drawn with, as kernels read them. Rows of one
kind are processed together. `NearNoise` lets C add the noise of rows to scores, precise enough for guesses.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specq.protocol import Int32Array, Int64Array, SamplingParams
from specq.runtime import library
from specq.verification import noise

SOURCE = Path(__file__).parent / "kernels" / "rows.c"


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the compiled library, or None if this machine cannot build it."""
    return library(SOURCE)


@cache
def near_scores() -> Any:
    """Return `specq_near_scores` (kernels/guess.h) with its types, for Python and other C. None as for `kernels`."""
    found = kernels()
    if found is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function = found.specq_near_scores
    function.argtypes = [pointer, number, ctypes.c_int, ctypes.c_int, pointer, pointer, number, pointer]
    function.restype = None
    return function


@cache
def masks() -> Any:
    """Return `specq_mask` with its types. None as for `kernels`."""
    found = kernels()
    if found is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function = found.specq_mask
    function.argtypes = [pointer, number, ctypes.c_int, ctypes.c_int, pointer, pointer, number]
    function.restype = None
    return function


# A row: its place in the packed logits, the position of its token in the context, and its sampling parameters. The C
# and Triton kernels read it unchanged. top_k: 0 for all. log_min_p: -inf for all.
ROW = np.dtype([
    ("logit_row", "<i8"),
    ("position", "<i8"),
    ("seed", "<u8"),
    ("top_k", "<i8"),
    ("top_p", "<f8"),
    ("temperature", "<f4"),
    ("log_min_p", "<f4"),
])  # fmt: skip
Rows = npt.NDArray[np.void]  # of ROW

# The kinds of rows: T = 0, sampled from all tokens, sampled from the tokens that top-k, top-p and min-p keep.
GREEDY, FREE, CUT = range(3)


def make_rows(
    params: Sequence[SamplingParams], positions: Sequence[int], logit_rows: Sequence[int] | None = None
) -> Rows:
    """Return one row for each of params and positions. By default the logit rows are 0, 1, ..."""
    places = range(len(params)) if logit_rows is None else logit_rows
    of_rows = [
        (place, at, p.seed, p.top_k, p.top_p, p.temperature, math.log(p.min_p) if p.min_p else -math.inf)
        for place, at, p in zip(places, positions, params, strict=True)
    ]
    return np.array(of_rows, ROW)


def noise_keys(rows: Rows) -> Int32Array:
    """Return i32[rows, 2]: the keys of the rows' own noise."""
    return noise.row_keys(rows["seed"], rows["position"], noise.Domain.GUMBEL)


def by_kind(rows: Rows) -> Iterator[tuple[int, Int64Array, Rows]]:
    """Yield each present kind, the places of its rows, and these rows."""
    is_cut = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["log_min_p"] > -np.inf)
    kinds = np.where(rows["temperature"] == 0, GREEDY, np.where(is_cut, CUT, FREE))
    for kind in sorted(set(kinds.tolist())):
        which = np.flatnonzero(kinds == kind)
        yield kind, which, rows[which]


def is_uncut(params: SamplingParams) -> bool:
    """Return whether all tokens count: no top-k, top-p or min-p, or temperature 0."""
    return params.temperature == 0 or not (params.top_k or params.top_p < 1 or params.min_p)


class NearNoise(NamedTuple):
    """The data for C to add the noise of rows itself, as `near_scores` does.

    - `function`: specq_near_scores of kernels/guess.h. None without a library.
    - `rows`: [num_rows] of `ROW`.
    """

    function: Any
    rows: Rows

    @staticmethod
    def is_known() -> bool:
        """Return whether there is a function."""
        return near_scores() is not None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[int]) -> NearNoise:
        """Return the data for rows with these parameters and token positions."""
        return cls(near_scores(), make_rows(params, positions))
