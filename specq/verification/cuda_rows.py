"""Target logits on a GPU, by the Triton kernels of gpu_kernels/: a row is read two or three times, and never copied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from specq.protocol import BoolArray, Float64Array, Int32Array, Int64Array, SamplingParams
from specq.runtime import resolve
from specq.verification.cuda_draws import WORDS, draw_words
from specq.verification.row_params import Rows, make_rows
from specq.verification.target_rows import Distributions, Edits, LookUp, check_numbers
from specq.verification.torch_rows import TorchRows
from specq.verification.transfers import Fetched, to_device

PROGRAMS = 4096  # of one warp each; about what the largest GPUs run at a time
MAX_SPLITS = 64
BLOCK = 256  # tokens that such a program looks at at a time
ROOM = 1024  # likely tokens that it gathers at most
WIDE_BLOCK, WIDE_WARPS = 1024, 8  # where one program has a row, or sums in float64


KERNELS = {
    "tops": "specq.verification.gpu_kernels.heads:tops_kernel",
    "heads": "specq.verification.gpu_kernels.heads:heads_kernel",
    "distributions": "specq.verification.gpu_kernels.distributions:distributions_kernel",
    "choose": "specq.verification.gpu_kernels.choose:choose_kernel",
    "probs": "specq.verification.gpu_kernels.lookups:probs_kernel",
    "chunks": "specq.verification.gpu_kernels.draws:chunks_kernel",
    "draw": "specq.verification.gpu_kernels.draws:draw_kernel",
}
WIDE = {"distributions", "chunks", "draw"}  # those whose programs look at WIDE_BLOCK tokens at a time
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
        self._pass: Pass | None = None

    def own_tokens(self, rows: Rows) -> Callable[[], Int32Array]:
        """See `TargetRows`."""
        own = self.own_tokens_among(rows)
        return lambda: own(np.arange(len(rows)))

    def own_tokens_among(self, rows: Rows) -> Callable[[Int64Array], Int32Array]:
        """See `TargetRows`; the device chooses those of all rows, so that nobody waits for it once more."""
        is_warm = rows["temperature"] > 0
        warm = Fetched(self._choose(rows, is_warm).best) if is_warm.any() else None
        cold = None if is_warm.all() else Fetched(self._best)

        def pick(which: Int64Array) -> Int32Array:
            tokens, of_warm = np.empty(len(which), np.int32), is_warm[which]
            if warm is not None:
                tokens[of_warm] = _pick(warm, which[of_warm])
            if cold is not None:
                tokens[~of_warm] = _pick(cold, rows["logit_row"][which[~of_warm]])
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
        return torch.where(to_device(is_warm, self.logits.device), found.best, self._best)

    def _choose(self, rows: Rows, is_warm: BoolArray) -> Pass:
        found = self._pass_over(rows)
        if (((rows["top_k"] > 0) | (rows["top_p"] < 1)) & is_warm).any():
            found.find_distributions(self, of_all=False)
        found.choose(self)
        return found

    def _pass_over(self, rows: Rows) -> Pass:
        """Return the pass over these rows; the same one where they are those that were last asked for, so that what was found serves again."""
        if self._pass is None or self._pass.rows is not rows:
            self._pass = Pass(self, rows)
        return self._pass

    def distributions(self, rows: Rows) -> LookUp:
        """See `TargetRows`."""
        found = self._pass_over(rows)
        found.find_distributions(self, of_all=True)
        fetched = Fetched(found.distributions)

        def look_up(which: Int64Array, token_ids: Int64Array) -> tuple[Distributions, Float64Array]:
            probs = found.look_up(self, which, token_ids)
            distributions = Distributions(rows, fetched.wait())
            check_numbers(bool(np.isfinite(distributions.found[:, 0]).all()))
            return distributions, probs.wait()

        return look_up

    def draw(self, distributions: Distributions, which: Int64Array, edits: Edits, uniforms: Float64Array) -> Int32Array:
        """See `TargetRows`."""
        num, num_edits = len(which), len(edits.place)
        num_chunks = min(MAX_SPLITS, -(-self.logits.shape[1] // WIDE_BLOCK))
        words = to_device(draw_words(distributions, which, edits, uniforms), self.logits.device)
        edit_ids = words[num * WORDS :]
        drawing = words, edit_ids, edit_ids[num_edits:].view(torch.float64)
        sums, chosen = self.empty((num, num_chunks), torch.float64), self.empty((num,), torch.int32)
        self.run("chunks", (num, num_chunks), *drawing, sums)
        self.run("draw", (num, 1), *drawing, sums, num_chunks, chosen)
        token_ids: Int32Array = Fetched(chosen).wait().copy()
        return token_ids

    def run(self, name: str, grid: tuple[int, int], *arguments: Any) -> None:
        """Launch a kernel over (rows, splits), or (rows, 1). From the second time on the compiled kernel is called directly:
        Triton's search for it costs several times what a launch does."""
        key = name, *self._kind, *(a for a in arguments if isinstance(a, bool))
        block, warps = (WIDE_BLOCK, WIDE_WARPS) if name in WIDE else (BLOCK, 1)
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


def _pick(found: Fetched, which: Int64Array) -> Int32Array:
    """Wait for the device and return the token with the largest value in any part, of some rows of i32[2, splits, rows]: bits of values,
    and tokens."""
    values, token_ids = found.wait()[:, :, which]
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
    target, which = CudaRows(logits), np.zeros(1, np.int64)
    found, _ = target.distributions(rows)(which, which[:, None])
    target.draw(found, which, Edits(which, which, np.ones(1)), np.full(1, 0.5))


class Pass:
    """What the kernels find for some rows of a target, which keeps it and is not kept by it: the logits are freed with their last user.

    best   i32[2, splits, rows]: bits of the largest scores of each part, and their tokens
    distributions   f64[rows, 4]: as in `Distributions`
    """

    def __init__(self, target: CudaRows, rows: Rows) -> None:
        self.rows, self._grid = rows, (len(rows), target.splits)
        self._words = to_device(rows.view(np.int64), target.logits.device)
        self.best = target.empty((2, target.splits, len(rows)), torch.int32)
        # Until `find_distributions`, anything of the right type.
        self._heads, self._head_ids, self.distributions = _nothing(target.logits.device)
        self._counts = self._is_in_heads = self._head_ids
        self._has_some = self._has_all = False

    def find_distributions(self, target: CudaRows, *, of_all: bool) -> None:
        """Run `heads_kernel` and `distributions_kernel`, on all rows or on those with top-k or top-p, unless that is done."""
        if self._has_all or (self._has_some and not of_all):
            return
        self._has_some, self._has_all = True, of_all
        num_rows, splits = self._grid
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

    def look_up(self, target: CudaRows, which: Int64Array, token_ids: Int64Array) -> Fetched:
        """Run `probs_kernel`, after `find_distributions` of all rows; return f64[n, c], as `LookUp` does."""
        num, width = token_ids.shape
        probs = target.empty((num, width), torch.float64)
        if num:
            asked = to_device(np.concatenate((which, token_ids.ravel())), target.logits.device)
            target.run("probs", (num, 1), self._words, self.distributions, asked, asked[num:], width, probs)
        return Fetched(probs)

    def choose(self, target: CudaRows) -> None:
        """Run `choose_kernel`; where there is top-k or top-p, after `find_distributions`."""
        rows = self._words, *target.tops, self._counts, self._heads, self._head_ids, ROOM, self.distributions
        found = self._is_in_heads, self.best[0].view(torch.float32), self.best[1]
        target.run("choose", self._grid, *rows, *found)


@cache
def _nothing(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.float64))


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
