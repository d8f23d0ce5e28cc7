"""Matrices in the panels that integer arithmetic reads (kernels/formats.h), and their packing from a file's blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specq.engines.native.rows import address
from specq.protocol import Float32Array

Bytes = npt.NDArray[np.uint8]

PANEL = 16
BLOCK_FORMATS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
FLOAT_FORMATS = {"F32": 0, "F16": 1, "BF16": 30}  # expanded to float32: for small tensors
FORMATS = {**FLOAT_FORMATS, **BLOCK_FORMATS}  # GGUF's name -> its number, which is ours
_SUPER_FORMATS = {number for name, number in BLOCK_FORMATS.items() if name.endswith("_K")}
_SUPER, _BLOCK = 256, 32


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """A matrix [num_rows, k]; `data` has its panels, u8[num_panels, bytes of a panel]."""

    format: int
    num_rows: int
    k: int
    data: Bytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.k

    @property
    def kinds(self) -> int:
        """Return the bit of its form of activations (`kinds` in kernels/blocks.h)."""
        return 0 if self.format in FLOAT_FORMATS.values() else 1 if self.format in _SUPER_FORMATS else 2

    @property
    def panels(self) -> npt.NDArray[np.int64]:
        """Return the C structure `Panel` of each panel, i64[num_panels, 2]: address and format."""
        addresses = address(self.data) + self.data.shape[1] * np.arange(len(self.data))
        return np.stack([addresses, np.full(len(self.data), self.format)], 1)


def panel_bytes(library: ctypes.CDLL, kind: str, k: int) -> int:
    """Return the bytes of a panel, 16 outputs."""
    library.specq_panel_bytes.restype = ctypes.c_int64
    return int(library.specq_panel_bytes(FORMATS[kind], ctypes.c_int64(k)))


def num_panels(num_rows: int) -> int:
    return -(-num_rows // PANEL)


def repack(library: ctypes.CDLL, kind: str, rows: Bytes, k: int) -> Bytes:
    """Return u8[num_panels, bytes of a panel]: the panels of a file's rows u8[num_rows, bytes of a row].

    Raises ValueError, which names the place, if a scale or a float is not finite.
    """
    rows = np.ascontiguousarray(rows)
    panels = np.zeros((num_panels(len(rows)), panel_bytes(library, kind, k)), np.uint8)
    library.specq_repack.restype = ctypes.c_int64
    sizes = (ctypes.c_int64(size) for size in (rows.shape[1], len(rows), k))
    pointers = (ctypes.c_void_p(address(array)) for array in (rows, panels))
    bad = library.specq_repack(FORMATS[kind], next(pointers), *sizes, next(pointers))
    if bad >= 0:
        width = 1 if kind in FLOAT_FORMATS else _SUPER if kind.endswith("_K") else _BLOCK
        row, block = divmod(bad, k // width)
        what = "a value" if width == 1 else "a scale"
        raise ValueError(f"{what} that is not finite, in row {row}, block {block}")
    return panels


def interleaved(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return the panels of several matrices of equal size in turns."""
    return np.stack(parts, 1).reshape(-1, 2)


def panel_bias(biases: Sequence[Float32Array], interleave: bool = False) -> Float32Array:
    """Return f32[whole panels]: biases [n] in the order of the matrices' panels."""
    padded = [np.pad(bias, (0, -len(bias) % PANEL)).reshape(-1, PANEL) for bias in biases]
    return (np.stack(padded, 1) if interleave else np.concatenate(padded)).reshape(-1)
