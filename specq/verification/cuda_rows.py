"""Target logits on a GPU, by the Triton kernels of gpu_kernels/: a row is read two or three times, and never copied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from specq.protocol import BoolArray, Int32Array, Int64Array, SamplingParams
from specq.runtime import resolve
from specq.verification.row_params import Rows, make_rows
from specq.verification.target_rows import LookUp, check_numbers
from specq.verification.torch_rows import TorchRows

PROGRAMS = 4096  # of one warp each; about what the largest GPUs run at a time
MAX_SPLITS = 64
BLOCK = 256  # tokens that such a program looks at at a time
ROOM = 1024  # likely tokens that it gathers at most
WIDE_BLOCK, WIDE_WARPS = 1024, 8  # where one program has a row


KERNELS = {
    "tops": "specq.verification.gpu_kernels.heads:tops_kernel",
    "heads": "specq.verification.gpu_kernels.heads:heads_kernel",
    "distributions": "specq.verification.gpu_kernels.distributions:distributions_kernel",
    "choose": "specq.verification.gpu_kernels.choose:choose_kernel",
}
_compiled: dict[tuple[Any, ...], Any] = {}


@cache
def is_available() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


class CudaRows(TorchRows):
    """See `specq.verification.target_rows.TargetRows`. The kernels begin as soon as this is made, with what every strategy
    needs: the largest logit of each row."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(logits if logits.stride(-1) == 1 else logits.contiguous())
        num_rows, vocab = logits.shape
        wanted, blocks = -(-PROGRAMS // max(num_rows, 1)), -(-vocab // BLOCK)
        self.splits = min(MAX_SPLITS, _power_of_two(wanted), blocks)
        self._shape = self.logits, self.logits.stride(0), vocab, self.splits
        is_aligned = self.logits.data_ptr() % 16 == 0
        self._kind = logits.device, logits.dtype, *self._shape[1:3], is_aligned
        # The bits of the largest logits of each part, and their tokens.
        self._best = self.empty((2, self.splits, num_rows), torch.int32)
        self.tops = num_rows, self._best[0].view(torch.float32)
        self.run("tops", (num_rows, self.splits), self.tops[1], self._best[1])

    def own_tokens(self, rows: Rows) -> Callable[[], Int32Array]:
        """See `TargetRows`."""
        is_warm = rows["temperature"] > 0
        if not is_warm.any():
            return lambda: self._pick(self._best, rows["logit_row"])
        found = self._choose(rows, is_warm)
        if is_warm.all():
            return lambda: self._pick(found.best, slice(None))

        def pick() -> Int32Array:
            tokens = np.empty(len(rows), np.int32)
            tokens[is_warm] = self._pick(found.best, np.flatnonzero(is_warm))
            tokens[~is_warm] = self._pick(self._best, rows["logit_row"][~is_warm])
            return tokens

        return pick

    def begin_own_tokens(self, rows: Rows) -> torch.Tensor:
        """Let the device choose the own tokens of all rows, in order; return i32[2, splits, rows]: of each part, the bits of the largest
        score, and its token."""
        assert len(rows) == len(self.logits)
        is_warm = rows["temperature"] > 0
        if not is_warm.any():
            return self._best
        found = self._choose(rows, is_warm)
        if is_warm.all():
            return found.best
        return torch.where(_to_device(torch.from_numpy(is_warm), self.logits.device), found.best, self._best)

    def _choose(self, rows: Rows, is_warm: BoolArray) -> Pass:
        found = Pass(self, rows)
        if (((rows["top_k"] > 0) | (rows["top_p"] < 1)) & is_warm).any():
            found.find_distributions(of_all=False)
        found.choose()
        return found

    def distributions(self, rows: Rows) -> LookUp:
        """See `TargetRows`."""
        found = Pass(self, rows)
        found.find_distributions(of_all=True)
        return lambda which, token_ids: self.look_up(rows, found.distributions, which, token_ids)

    def run(self, name: str, grid: tuple[int, int], *arguments: Any) -> None:
        """Launch a kernel over (rows, splits), or (rows, 1). From the second time on the compiled kernel is called directly:
        Triton's search for it costs several times what a launch does."""
        key = name, *self._kind, *(a for a in arguments if isinstance(a, bool))
        is_wide = name == "distributions"
        block, warps = (WIDE_BLOCK, WIDE_WARPS) if is_wide else (BLOCK, 1)
        with self._place():
            if compiled := _compiled.get(key):
                compiled[(*grid, 1)](*self._shape, *arguments, block)
            else:
                kernel = resolve("kernel", KERNELS, name)
                _compiled[key] = kernel[grid](*self._shape, *arguments, BLOCK=block, num_warps=warps)

    def _place(self) -> AbstractContextManager[Any]:
        """Make the logits' device the current one. Under Triton's interpreter they are on a CPU."""
        is_current = not self.logits.is_cuda or self.logits.device.index == torch.cuda.current_device()
        return nullcontext() if is_current else torch.cuda.device(self.logits.device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory where the logits are."""
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def _pick(self, best: torch.Tensor, which: Int64Array | slice) -> Int32Array:
        """Wait for the device and return the token with the largest value in any part, of some rows of i32[2, splits, rows]:
        bits of values, and tokens."""
        values, token_ids = best.cpu().numpy()[:, :, which]
        scores = values.view(np.float32)
        highest = scores.max(0)  # a NaN, if there is one
        check_numbers(bool(np.isfinite(highest).all()))
        own: Int32Array = np.where(scores == highest, token_ids, np.iinfo(np.int32).max).min(0)
        return own


def warm_up(like: torch.Tensor) -> None:
    """Compile the kernels for logits [.., vocab] of this type, width and stride."""
    logits = like.new_zeros(2, like.stride(0))[:, : like.shape[1]]
    params = [SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=1.0)]
    rows = make_rows(params, [0, 0])
    CudaRows(logits).own_tokens(rows)()
    CudaRows(logits).distributions(rows)(np.zeros(1, np.int64), np.zeros((1, 1), np.int64))


class Pass:
    """What the kernels find for some rows.

    best   i32[2, splits, rows]: bits of the largest scores of each part, and their tokens
    distributions   f64[rows, 4]: as in `Distributions`
    """

    def __init__(self, target: CudaRows, rows: Rows) -> None:
        self._target, self._grid = target, (len(rows), target.splits)
        self._words = _to_device(torch.from_numpy(rows.view(np.int64)), target.logits.device)
        self.best = target.empty((2, target.splits, len(rows)), torch.int32)
        # Until `find_distributions`, anything of the right type.
        self._heads, self._head_ids, self.distributions = _nothing(target.logits.device)
        self._counts = self._is_in_heads = self._head_ids

    def find_distributions(self, *, of_all: bool) -> None:
        """Run `heads_kernel` and `distributions_kernel`, on all rows or on those with top-k or top-p."""
        target, (num_rows, splits) = self._target, self._grid
        block = target.empty((5, num_rows, splits, ROOM), torch.int32)
        self._heads, scaled = block[0].view(torch.float32), block[1].view(torch.float32)
        self._head_ids, weights = block[2], block[3:].view(-1).view(torch.float64)
        sums, self.distributions = (
            target.empty((num_rows, splits, 2), torch.float64),
            target.empty((num_rows, 4), torch.float64),
        )
        counts = target.empty((num_rows * (splits + 1),), torch.int32)
        self._counts, self._is_in_heads = counts[num_rows:], counts[:num_rows]
        rows = self._words, *target.tops, self._counts, self._heads
        target.run("heads", self._grid, *rows, self._head_ids, ROOM, sums, of_all)
        distributions = ROOM, scaled, weights, sums, self.distributions, self._is_in_heads, int(of_all)
        target.run("distributions", (num_rows, 1), *rows, *distributions)

    def choose(self) -> None:
        """Run `choose_kernel`; where there is top-k or top-p, after `find_distributions`."""
        target = self._target
        rows = self._words, *target.tops, self._counts, self._heads, self._head_ids, ROOM, self.distributions
        found = self._is_in_heads, self.best[0].view(torch.float32), self.best[1]
        target.run("choose", self._grid, *rows, *found)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values to the device without waiting for what it was given before, which memory that may be paged can need."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@cache
def _nothing(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.float64))


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
