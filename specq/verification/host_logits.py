"""Logits of the host's memory are NumPy arrays, everywhere in the judge. Tensors are those of a GPU.

So a process that judges on a CPU needs no torch. Callers with tensors of a CPU pass the arrays that share their memory.
`HostEdits` changes them for a while, for `specq.verification.processors`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specq.protocol import BoolArray, Float32Array, Int64Array, IntpArray

if TYPE_CHECKING:
    import torch

    Logits = Float32Array | torch.Tensor
else:
    Logits = Any


def on_host(logits: Logits) -> Logits:
    """Return logits of the host as float32 array, and a GPU's tensor unchanged.

    A float32 array and a CPU's float32 tensor are not copied. Tensors of devices without float64, which noise and
    distributions need, are copied to the host.
    """
    if isinstance(logits, np.ndarray):
        return logits if logits.dtype == np.float32 else logits.astype(np.float32)
    if logits.is_cuda:
        return logits
    values: Float32Array = logits.detach().float().cpu().numpy()
    return values


def without_bad_rows(logits: Logits) -> tuple[Float32Array, BoolArray, Logits]:
    """Return each row's highest logit, whether that is not a finite number, and the logits with zeros in these rows."""
    if isinstance(logits, np.ndarray):
        highest: Float32Array = logits.max(-1)  # a NaN is the largest of all
        is_bad = ~np.isfinite(highest)
        return highest, is_bad, np.where(is_bad[:, None], np.float32(0), logits)
    largest = logits.amax(-1).float()
    bad = ~largest.isfinite()
    return largest.cpu().numpy(), bad.cpu().numpy(), logits.masked_fill(bad[:, None], 0)


Places = Int64Array  # of logits: rows * stride + token


class HostEdits:
    """Logits f32[rows, vocab]: changed in place and restored. If the layout does not fit, a copy is changed."""

    def __init__(self, logits: Float32Array) -> None:
        num_rows, vocab = logits.shape
        item = logits.itemsize
        is_plain = logits.strides[1] == item and logits.strides[0] >= vocab * item and logits.flags.writeable
        self.logits: Logits = logits if is_plain else logits.copy()
        self._rows_of: Float32Array = self.logits
        self.stride, self.vocab = self._rows_of.strides[0] // item, vocab
        size = (num_rows - 1) * self.stride + vocab
        self._flat: Float32Array = np.lib.stride_tricks.as_strided(self._rows_of, (size,), (item,))
        self._before: list[tuple[Places, Float32Array]] = []
        self._whole: list[tuple[Float32Array, Float32Array]] = []

    def put(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Return what `change` computes with, made from an array."""
        return array

    def change(self, places: Places, how: Callable[[Float32Array], Float32Array]) -> None:
        """Change the logits at some places. A place may occur twice only if both get the same value."""
        if len(places):
            before = self._flat[places]
            self._before.append((places, before))
            with np.errstate(all="ignore"):  # what is not a number is found by the judge
                self._flat[places] = how(before)

    def keep(self, rows: slice, token_ids: IntpArray) -> None:
        """Forbid all tokens except these in some rows. Call it before `change`."""
        own = self._rows_of[rows]
        before = own.copy()
        self._whole.append((own, before))
        own[:] = -np.inf
        own[:, token_ids] = before[:, token_ids]

    def restore(self) -> None:
        """Undo all changes."""
        while self._before:
            places, before = self._before.pop()
            self._flat[places] = before
        while self._whole:
            own, before = self._whole.pop()
            own[:] = before
