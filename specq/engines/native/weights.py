"""The weights of a Llama-like decoder as arrays, and their packing for `NativeForward`.

The C kernels read the weights of linear layers in panels of 16 outputs, in their original format. A weight is a float32
array, stored as bfloat16 if that is exact. Or it is a `BlockWeight`: a file's own quantised blocks. The blocks stay as
they are. The kernel expands them to exactly the dequantised values. kernels/weights.h has the formats. To add one, add
a line to `BLOCK_TYPES`. Add its layout and arithmetic to that file. For integer arithmetic all matrices are
`PanelMatrix`: packed already.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.engines.native.panels import PANEL, Bytes, PanelMatrix
from specq.engines.native.rows import address
from specq.protocol import Float32Array


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers that are computed as one.

    - weights: [n, k] each, all float32, all in blocks of one type, or all in panels.
    - biases: f32[n] each; empty: no biases.
    - interleaves: whether their rows alternate in groups of 8, or panels of 16; else one layer comes after the other.
    """

    weights: Sequence[Weight]
    biases: Sequence[Float32Array] = ()
    interleaves: bool = False

    @property
    def most_bytes(self) -> int:
        """The most bytes that they take when packed: as floats, each padded to whole panels."""
        copied = (weight.shape for weight in self.weights if not isinstance(weight, PanelMatrix))
        return sum(4 * (num_rows + PANEL) * k + LINE for num_rows, k in copied)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Norms are f32[hidden], those of queries and keys f32[head_dim] or None.

    - qkv: projections of queries, keys and values.
    - out: projection of the attention output.
    - gate_up: the first two projections of the MLP, interleaved.
    - down: the last projection of the MLP.
    """

    attn_norm: Float32Array
    mlp_norm: Float32Array
    q_norm: Float32Array | None
    k_norm: Float32Array | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """A whole model.

    - eps: epsilon of the norms.
    - scale: factor of the scores before softmax.
    - embedding: f32[vocab, hidden], or in panels.
    - head: the projection to logits.
    - cos, sin: f32[positions, head_dim / 2].
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float
    embedding: Float32Array | PanelMatrix
    final_norm: Float32Array
    cos: Float32Array
    sin: Float32Array
    layers: Sequence[DecoderLayer]
    head: Linear

    def linears(self) -> Iterator[Linear]:
        """Yield all linear layers, in the order in which a step reads them."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head


TURN = 8  # size of a group of rows of one matrix, if two are interleaved
F32, BF16 = 0, 1
BLOCK_TYPES = {"Q4_1": (2, 20), "Q8_0": (3, 34)}  # GGUF's name -> number in weights.h, bytes of a block
BLOCK = 32  # weights of a block
LINE, LARGE_PAGE = 64, 2 << 20  # bytes


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix [n, k] in GGUF's blocks. A block has 32 consecutive weights of a row.

    - type: a key of BLOCK_TYPES.
    - data: u8[n, k / 32 * bytes of a block].
    """

    type: str
    data: Bytes

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.data.shape[1] // BLOCK_TYPES[self.type][1] * BLOCK


Unpacked = Float32Array | BlockWeight
Weight = Unpacked | PanelMatrix


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in the form that the kernels read.

    - format: as in weights.h.
    - k: weights of each column.
    - data: u8, all panels.
    """

    format: int
    num_panels: int
    k: int
    data: Bytes


class Arena:
    """Memory for a model's packed weights, in large pages if the system has them.

    The weights are contiguous, in the order in which a step reads them. So a prefetch past the end of one matrix reads
    the next one. Pages that are never written take no memory.
    """

    def __init__(self, most_bytes: int) -> None:
        memory = mmap.mmap(-1, most_bytes + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._start = self._used = -address(self._bytes) % LARGE_PAGE

    @property
    def num_bytes(self) -> int:
        """The bytes taken so far."""
        return self._used - self._start

    def take(self, num_bytes: int) -> Bytes:
        """Return u8[num_bytes], all zero."""
        taken = self._bytes[self._used : self._used + num_bytes]
        assert len(taken) == num_bytes, "more weights than were announced"
        self._used += -(-num_bytes // LINE) * LINE
        return taken


def trim_memory() -> None:
    """Return freed memory to the system, such as the weights that are now packed.

    glibc keeps freed memory below smaller live allocations.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def pack(library: ctypes.CDLL, arena: Arena, weights: Sequence[Unpacked], interleave: bool = False) -> PackedMatrix:
    """Pack matrices of equal k and kind one below the other.

    With interleave (equal n, a multiple of 8) their rows alternate in groups of 8.
    """
    sources = [weight.data if isinstance(weight, BlockWeight) else np.ascontiguousarray(weight) for weight in weights]
    number = _format(library, weights[0], sources)
    rows = [address(source) + i * source.strides[0] for source in sources for i in range(len(source))]
    if interleave:
        rows = np.array(rows).reshape(len(sources), -1, TURN).swapaxes(0, 1).reshape(-1).tolist()
    rows += [0] * (-len(rows) % PANEL)
    num_panels, k = len(rows) // PANEL, weights[0].shape[1]
    library.specq_packed_bytes.restype = ctypes.c_int64
    sizes = ctypes.c_int64(num_panels), ctypes.c_int64(k)
    data = arena.take(library.specq_packed_bytes(number, *sizes))
    library.specq_pack(number, (ctypes.c_void_p * len(rows))(*rows), *sizes, ctypes.c_void_p(address(data)))
    return PackedMatrix(number, num_panels, k, data)


def _format(library: ctypes.CDLL, weight: Unpacked, sources: Sequence[npt.NDArray[Any]]) -> int:
    if isinstance(weight, BlockWeight):
        return BLOCK_TYPES[weight.type][0]
    exact = (library.specq_is_bf16(ctypes.c_void_p(address(s)), ctypes.c_int64(s.size)) for s in sources)
    return BF16 if all(exact) else F32


def pack_bias(biases: Sequence[Float32Array], interleave: bool = False) -> Float32Array:
    """Return f32[whole panels]: biases [n] in the order in which `pack` puts the rows."""
    merged = (
        np.stack([bias.reshape(-1, TURN) for bias in biases], 1).reshape(-1) if interleave else np.concatenate(biases)
    )
    return np.pad(merged, (0, -len(merged) % PANEL))
