"""Products of the vendor's library whose rows have the same bits in any batch, checked before they are used.

With a product that adds along K in one order, the tile may be chosen by the number of rows, and a row's bits stay. So
the library must not split K (`forbid_splits`). What it then chooses is not assumed to be equal: for each number of
rows, each matrix's shape is multiplied with random rows and compared with the products of few rows, bit by bit, also
from a CUDA graph. Numbers of rows that fail are not used: steps are padded to the next one.

Measured on an H200 (docs/log/gpu-2.md): without splits all sizes are equal, and with splits the output projections
differ below 64 and 448 rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specq.engines.torch.cuda.weights import DecoderWeights
from specq.protocol import ConfigError

SEED = 20261130


def forbid_splits() -> None:
    """Let this process's products of bfloat16 and float16 add along K in one order. For the whole process.

    Raises ConfigError if this torch cannot.
    """
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")  # only it can be told
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"batch_invariant: torch {torch.__version__} cannot keep cuBLASLt from splitting sums ({error}); "
            "2.11 for CUDA can"
        ) from None


class EqualProducts:
    """The numbers of rows with which products of a model's shapes have a row's bits in any batch.

    `least` rows, and multiples of it, are what others are compared with.
    """

    def __init__(self, weights: DecoderWeights, least: int) -> None:
        layer = weights.layers[0]
        matrices = (layer.qkv, layer.out, layer.gate_up, layer.down, weights.head)
        self._matrices = list({matrix.shape: matrix for matrix in matrices}.values())
        self._least = least
        self._known: dict[int, bool] = {}

    def among(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Return the sizes with equal products. Raises ConfigError if they are not most of them."""
        sizes = tuple(sizes)
        found = tuple(size for size in sizes if self.are_equal(size))
        if 2 * len(found) < len(sizes):
            raise ConfigError(
                "batch_invariant: this device's products of a row depend on the number of rows "
                f"({len(sizes) - len(found)} of {len(sizes)} numbers); set it to false"
            )
        return found

    def are_equal(self, num_rows: int) -> bool:
        """Return whether each row of a product of `num_rows` rows has the bits that it has among few rows."""
        if num_rows not in self._known:
            self._known[num_rows] = all(self._check(matrix, num_rows) for matrix in self._matrices)
        return self._known[num_rows]

    def _check(self, matrix: torch.Tensor, num_rows: int) -> bool:
        generator = torch.Generator(matrix.device).manual_seed(SEED)
        most = -(-num_rows // self._least) * self._least
        shape = (most, matrix.shape[1])
        rows = torch.randn(shape, device=matrix.device, generator=generator).to(matrix.dtype)
        wanted = torch.cat([torch.mm(few, matrix.T) for few in torch.split(rows, self._least)])[:num_rows]
        found = torch.mm(rows[:num_rows], matrix.T)
        return torch.equal(found, wanted) and torch.equal(_replayed(rows[:num_rows], matrix), wanted)


def _replayed(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the product as a CUDA graph computes it; on a CPU, as it is."""
    if rows.device.type != "cuda":
        return torch.mm(rows, matrix.T)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = torch.mm(rows, matrix.T)
    graph.replay()
    torch.cuda.current_stream().synchronize()
    return found
