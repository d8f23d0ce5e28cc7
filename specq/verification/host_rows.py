"""Target logits in the host's memory, with the C kernels of `host_kernels`.

For a vocabulary of thousands, a judgement takes dozens of calls of NumPy or torch. Each call costs more than the
arithmetic. Here one call handles all rows of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array
from specq.verification.host_kernels import Rows
from specq.verification.packing import Drafted
from specq.verification.target_rows import Bars, Distributions, Edits, JudgedPaths, LookUp, Trees, check_numbers

# Number of logits with T > 0 above which judging level by level is faster. It reads only the rows that accepted paths
# reach.
MANY_LOGITS = 32 * 4096


class HostRows:
    """See `specq.verification.target_rows.TargetRows`."""

    def __init__(self, logits: Float32Array, library: ctypes.CDLL) -> None:
        self._logits = logits if logits.strides[-1] == logits.itemsize else np.ascontiguousarray(logits)
        self._library = library

    def prefers_levels(self, num_sampled: int) -> bool:
        """See `TargetRows`."""
        return num_sampled * int(self._logits.shape[1]) > MANY_LOGITS

    def own_tokens(self, rows: Rows) -> Callable[[], Int32Array]:
        """See `TargetRows`."""
        token_ids = np.empty(len(rows), np.int32)
        self._call(self._library.specq_own_tokens, rows, token_ids)
        return lambda: token_ids

    def own_tokens_among(self, rows: Rows) -> Callable[[Int64Array], Int32Array]:
        """See `TargetRows`. It computes only the chosen rows."""
        return lambda which: self.own_tokens(rows[which])()

    def distributions(self, rows: Rows) -> LookUp:
        """See `TargetRows`."""

        def look_up(which: Int64Array, token_ids: Int64Array) -> tuple[Distributions, Float64Array]:
            distributions, probs = Distributions(rows, np.empty((len(rows), 4))), np.empty(token_ids.shape)
            shape = (ctypes.c_long(len(which)), ctypes.c_long(token_ids.shape[1]))
            self._call(
                self._library.specq_distributions, rows, distributions.found, which, token_ids, probs, more=shape
            )
            return distributions, probs

        return look_up

    def walk(self, rows: Rows, drafted: Drafted, residuals: Float64Array) -> JudgedPaths | None:
        """See `TargetRows`."""
        return None

    def longest(self, rows: Rows, warm: Rows, trees: Trees, bars: Bars) -> JudgedPaths | None:
        """See `TargetRows`."""
        return None

    def draw(self, distributions: Distributions, which: Int64Array, edits: Edits, uniforms: Float64Array) -> Int32Array:
        """See `TargetRows`."""
        token_ids = np.empty(len(which), np.int32)
        starts = edits.place.searchsorted(np.arange(len(which) + 1))
        rows, found = distributions.rows[which], distributions.found[which]
        edited = starts, edits.token_ids, edits.values
        self._call(self._library.specq_draw, rows, found, *edited, uniforms, token_ids)
        return token_ids

    def _call(self, function: Any, rows: Rows, *arrays: npt.NDArray[Any], more: tuple[ctypes.c_long, ...] = ()) -> None:
        """Call a kernel with the logits, rows and other arrays. All must be contiguous."""
        stride, vocab = self._logits.strides[0] // 4, self._logits.shape[1]
        shape = ctypes.c_long(stride), vocab, len(rows)
        check_numbers(function(_pointer(self._logits), *shape, *map(_pointer, (rows, *arrays)), *more) == 0)


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
