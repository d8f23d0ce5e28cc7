"""Products whose rows have the same bits in any batch, checked before they are used.

With a product that adds along K in one order, the tile may be chosen by the number of rows, and a row's bits stay. Our
kernels do, and the vendor's library must not split K (`forbid_splits`). Equal bits are not assumed: for each number of
rows, each matrix's shape is multiplied with random rows as a step does, and compared bit by bit with the library's
products of few rows, also from a CUDA graph. Numbers of rows that fail are not used: steps are padded to the next one.

Without splits the library has bad cuts for some shapes. Weights times rows instead of rows times weights has other
cuts, and the same bits. So where this is clearly faster for a product that is added to the residual stream, it is used,
and a number of rows that takes longer than a larger one is not.

Measured on an H200 (docs/log/gpu-2.md): without splits all sizes are equal, and with splits the output projections
differ below 64 and 448 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields

import torch

from specq.engines.torch.cuda.tiles import Tiles
from specq.engines.torch.cuda.weights import DecoderWeights
from specq.protocol import ConfigError

# Multiply rows [n, K] with the transpose of the matrix of this name (a field of Tiles): [n, matrix rows].
Multiply = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]

SEED = 20261130
TURNABLE = ("out", "down")
TURN_US = 8.0  # least gain of turning a product; reading it takes a few us longer
SLOW = 1.05
LAUNCHES, TURNS = 8, 3  # of a product that is timed


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


def device_us(work: Callable[[], torch.Tensor]) -> float:
    """Return the microseconds that work takes the device; 0 on a CPU."""
    if not work().is_cuda:
        return 0.0
    found = []
    for _ in range(TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(LAUNCHES):
            work()
        end.record()
        end.synchronize()
        found.append(1e3 * float(begin.elapsed_time(end)) / LAUNCHES)
    return min(found)


class EqualProducts:
    """The numbers of rows with which products of a model's shapes have a row's bits in any batch.

    `least` rows, and multiples of it, are what others are compared with. Below it are our own kernels.

    turned  see `layers.FusedDecoder.turned`.
    """

    def __init__(
        self, weights: DecoderWeights, multiply: Multiply, least: int,
        timed: Callable[[Callable[[], torch.Tensor]], float] = device_us,
    ) -> None:  # fmt: skip
        layer = weights.layers[0]
        matrices = {field.name: getattr(layer, field.name, weights.head) for field in fields(Tiles)}
        self._matrices = {matrix.shape: (name, matrix) for name, matrix in matrices.items()}.values()
        self._multiply, self._least, self._timed = multiply, least, timed
        self._known: dict[int, bool] = {}
        self.turned: frozenset[tuple[str, int]] = frozenset()

    def among(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Return the ascending sizes with equal products, and choose the turned ones.

        Sizes that take clearly longer than a larger one are left out. Raises ConfigError if most are not equal.
        """
        sizes = tuple(sizes)
        found = [size for size in sizes if self.are_equal(size)]
        if 2 * len(found) < len(sizes):
            raise ConfigError(
                "batch_invariant: this device's products of a row depend on the number of rows "
                f"({len(sizes) - len(found)} of {len(sizes)} numbers); set it to false"
            )
        wide = [size for size in found if size >= self._least]
        times = {size: sum(self._time(name, matrix, size) for name, matrix in self._matrices) for size in wide}
        slow = {size for size in wide if any(size < other and times[size] > SLOW * times[other] for other in wide)}
        return tuple(size for size in found if size not in slow)

    def are_equal(self, num_rows: int) -> bool:
        """Return whether each row of a product of `num_rows` rows has the bits that it has among few rows."""
        if num_rows not in self._known:
            self._known[num_rows] = all(
                self._check(name, matrix, num_rows, self._multiply) for name, matrix in self._matrices
            )
        return self._known[num_rows]

    def _time(self, name: str, matrix: torch.Tensor, num_rows: int) -> float:
        """Return the microseconds of a product, and turn it if that is clearly faster."""
        rows = matrix.new_ones(num_rows, matrix.shape[1])
        us = self._timed(lambda: torch.mm(rows, matrix.T))
        if name not in TURNABLE:
            return us
        turned_us = self._timed(lambda: torch.mm(matrix, rows.T))
        if us - turned_us < TURN_US or not self._check(name, matrix, num_rows, _turned):
            return us
        self.turned |= {(name, num_rows)}
        return turned_us

    def _check(self, name: str, matrix: torch.Tensor, num_rows: int, multiply: Multiply) -> bool:
        generator = torch.Generator(matrix.device).manual_seed(SEED)
        most = -(-num_rows // self._least) * self._least
        shape = (most, matrix.shape[1])
        rows = torch.randn(shape, device=matrix.device, generator=generator).to(matrix.dtype)
        wanted = torch.cat([torch.mm(few, matrix.T) for few in torch.split(rows, self._least)])[:num_rows]
        rows = rows[:num_rows]
        found = multiply(rows, matrix, name)
        return torch.equal(found, wanted) and torch.equal(_replayed(multiply, rows, matrix, name), wanted)


def _turned(rows: torch.Tensor, matrix: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG001 - a Multiply
    return torch.mm(matrix, rows.T).T


def _replayed(multiply: Multiply, rows: torch.Tensor, matrix: torch.Tensor, name: str) -> torch.Tensor:
    """Return the product as a CUDA graph computes it; on a CPU, as it is."""
    if rows.device.type != "cuda":
        return multiply(rows, matrix, name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = multiply(rows, matrix, name)
    graph.replay()
    torch.cuda.current_stream().synchronize()
    return found
