"""Target logits on a GPU, with the Triton kernels of gpu_kernels/. A row is read two or three times, never copied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from specq.protocol import Float64Array, Int32Array, Int64Array, SamplingParams
from specq.runtime import resolve
from specq.verification import cuda_paths
from specq.verification.cuda_paths import WORDS, draw_words
from specq.verification.gpu_kernels import KERNELS
from specq.verification.host_kernels import Rows, make_rows
from specq.verification.packing import Drafted
from specq.verification.target_rows import Bars, Distributions, Edits, JudgedPaths, LookUp, Trees, check_numbers
from specq.verification.torch_rows import TorchRows
from specq.verification.transfers import Fetched, to_device

# Programs of one warp that a multiprocessor runs at a time. Further programs would wait for the first to end.
PROGRAMS = 32
REGISTERS = 64  # of each thread, so that these programs fit
MAX_SPLITS = 64
BLOCK = 256  # tokens that such a program processes at a time
ROOM = 16  # most likely tokens that each lane gathers
WIDE_ROOM = 1280  # and all lanes of a program together, on average over a row's programs
WIDE_BLOCK, WIDE_WARPS = 1024, 8  # if one program has a whole row, or sums in float64

MASK_BLOCK, MASK_SPLITS = 1024, 8

WIDE = {"distributions", "chunks", "draw"}  # kernels whose programs process WIDE_BLOCK tokens at a time
OF_ROWS = {"tops", "heads", "choose"}  # kernels that fill the device
OF_TREES = {"walk", "longest"}  # kernels with one drafted tree per program
_compiled: dict[tuple[Any, ...], Any] = {}


@cache
def is_available() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


class CudaRows(TorchRows):
    """See `specq.verification.target_rows.TargetRows`.

    The constructor launches the first kernel. It finds the largest logit of each row, which every strategy needs.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(logits if logits.stride(-1) == 1 else logits.contiguous())
        num_rows, vocab = logits.shape
        self.splits = min(MAX_SPLITS, max(_programs(logits.device) // max(num_rows, 1), 1), -(-vocab // BLOCK))
        self._shape = self.logits, self.logits.stride(0), vocab, self.splits
        is_aligned = self.logits.data_ptr() % 16 == 0
        self._kind = logits.device, logits.dtype, *self._shape[1:3], is_aligned
        # The bits of each part's largest logits, and their tokens.
        self._best = self.empty((2, self.splits, num_rows), torch.int32)
        self.tops, self.top_ids = (num_rows, self._best[0].view(torch.float32)), self._best[1]
        self.run("tops", (num_rows, self.splits), self.tops[1], self.top_ids)
        self._pass: Pass | None = None

    def own_tokens(self, rows: Rows) -> Callable[[], Int32Array]:
        """See `TargetRows`."""
        own = self.own_tokens_among(rows)
        return lambda: own(np.arange(len(rows)))

    def own_tokens_among(self, rows: Rows) -> Callable[[Int64Array], Int32Array]:
        """See `TargetRows`. The device chooses the tokens of all rows, so the host does not wait a second time."""
        found = Fetched(self.begin_own_tokens(rows)[:2])

        def own(which: Int64Array) -> Int32Array:
            bits, tokens = found.wait()
            check_numbers(bool(np.isfinite(bits.view(np.float32)[which]).all()))
            own_tokens: Int32Array = tokens[which]
            return own_tokens

        return own

    def begin_own_tokens(self, rows: Rows) -> torch.Tensor:
        """Let the device choose the own tokens of rows, and return i32[3, rows].

        The rows are the bits of the largest scores, the tokens, and tokens that are always valid. The score of a row
        without a token is not finite.
        """
        num_rows, places = len(self.logits), rows["logit_row"]
        if rows["temperature"].any() or not np.array_equal(places, np.arange(num_rows)):
            return self._pick(self._choose(rows))
        return self._pick(self._best)

    def _choose(self, rows: Rows) -> torch.Tensor:
        found = self._pass_over(rows)
        if found.is_ranked:
            found.find_distributions(self, of_all=False)
        best = self.empty((2, self.splits, len(rows)), torch.int32)
        found.choose(self, best)
        return best

    def _pick(self, best: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result of `begin_own_tokens` for i32[2, parts, rows]: bits of values, and tokens.

        The tokens also go to `tokens`, if given.
        """
        _, parts, num_rows = best.shape
        found = self.empty((3, num_rows), torch.int32)
        own = found[1] if tokens is None else tokens
        self.run(
            "pick",
            (num_rows, 1),
            best[0].view(torch.float32),
            best[1],
            parts,
            found[0].view(torch.float32),
            own,
            found[2],
        )
        return found

    def choose_at(self, rows: Rows, warm: Rows, which: torch.Tensor, tokens: torch.Tensor) -> None:
        """Let the device choose own tokens i32[n] for the rows `which` i32[n].

        `warm`: the same rows if T > 0. They have distributions.
        """
        parts = min(MAX_SPLITS, -(-self.logits.shape[1] // BLOCK))
        best = self.empty((2, parts, len(which)), torch.int32)
        words = None if rows is warm else to_device(rows.view(np.int64), self.logits.device)
        self._pass_over(warm).choose(self, best, which, words)
        self._pick(best, tokens)

    def _pass_over(self, rows: Rows) -> Pass:
        """Return the pass over these rows. The latest pass is reused if the rows are the same object."""
        if self._pass is None or self._pass.rows is not rows:
            self._pass = Pass(self, rows)
        return self._pass

    def distributions(self, rows: Rows) -> LookUp:
        """See `TargetRows`."""
        found = self._pass_over(rows)
        found.find_distributions(self, of_all=True)

        def look_up(which: Int64Array, token_ids: Int64Array) -> tuple[Distributions, Float64Array]:
            fetched, probs = Fetched(found.distributions), found.look_up(self, which, token_ids)
            distributions = Distributions(rows, fetched.wait())
            check_numbers(bool(np.isfinite(distributions.found[:, 0]).all()))
            return distributions, probs.wait()

        return look_up

    def found_of(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the words of rows with T > 0, and their distributions f64[rows, 4], on the device."""
        found = self._pass_over(rows)
        found.find_distributions(self, of_all=True)
        return found.words, found.distributions

    def walk(self, rows: Rows, drafted: Drafted, residuals: Float64Array) -> JudgedPaths | None:
        """See `TargetRows`."""
        fits = cuda_paths.fits(drafted.firsts, drafted.weights.shape[1])
        return cuda_paths.walk(self, rows, drafted, residuals) if fits else None

    def longest(self, rows: Rows, warm: Rows, trees: Trees, bars: Bars) -> JudgedPaths | None:
        """See `TargetRows`."""
        return cuda_paths.longest(self, rows, warm, trees, bars) if cuda_paths.fits(trees.firsts, 0) else None

    def draw(self, distributions: Distributions, which: Int64Array, edits: Edits, uniforms: Float64Array) -> Int32Array:
        """See `TargetRows`."""
        num, num_edits = len(which), len(edits.place)
        words = to_device(draw_words(distributions, which, edits, uniforms), self.logits.device)
        edit_ids, chosen = words[num * WORDS :], self.empty((num,), torch.int32)
        self.run_draws(num, (words, edit_ids, edit_ids[num_edits:].view(torch.float64)), chosen)
        token_ids: Int32Array = Fetched(chosen).wait().copy()
        return token_ids

    def run_draws(self, num: int, drawing: tuple[torch.Tensor, ...], chosen: torch.Tensor) -> None:
        """Draw tokens i32[num]. `drawing`: DRAW of all, and the edits' tokens i64 and weights f64."""
        num_chunks = min(MAX_SPLITS, -(-self.logits.shape[1] // WIDE_BLOCK))
        sums = self.empty((num, num_chunks), torch.float64)
        self.run("chunks", (num, num_chunks), *drawing, sums)
        self.run("draw", (num, 1), *drawing, sums, num_chunks, chosen)

    def run(self, name: str, grid: tuple[int, int], *arguments: Any) -> None:
        """Launch a kernel over (rows, splits), or (rows, 1).

        From the second time on, the compiled kernel is called directly. Triton's search for it costs several times as
        much as a launch.
        """
        key = name, *self._kind, *(a for a in arguments if isinstance(a, bool))
        block, warps, registers = _sizes(name)
        with _place(self.logits):
            if compiled := _compiled.get(key):
                compiled[(*grid, 1)](*self._shape, *arguments, block)
            else:
                kernel = resolve("kernel", KERNELS, name)
                _compiled[key] = kernel[grid](*self._shape, *arguments, BLOCK=block, num_warps=warps, maxnreg=registers)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory on the logits' device."""
        return torch.empty(shape, dtype=dtype, device=self.logits.device)


def _place(logits: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the logits' device the current one. Under Triton's interpreter they are on a CPU."""
    is_current = not logits.is_cuda or logits.device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(logits.device)


def mask_rows(logits: torch.Tensor, rows: Int64Array, words: Int32Array) -> None:
    """Set the logits of forbidden tokens to -inf, in the rows i64[n] with masks i32[n, words]."""
    shape = logits, logits.stride(0), logits.shape[1], words.shape[1]
    key = "mask", logits.device, logits.dtype, *shape[1:], logits.data_ptr() % 16 == 0
    with _place(logits):
        sent = to_device(rows, logits.device), to_device(words, logits.device)
        if compiled := _compiled.get(key):
            compiled[(len(rows), MASK_SPLITS, 1)](*shape, *sent, MASK_BLOCK)
        else:
            kernel = resolve("kernel", KERNELS, "mask")
            _compiled[key] = kernel[len(rows), MASK_SPLITS](*shape, *sent, BLOCK=MASK_BLOCK)


def _sizes(name: str) -> tuple[int, int, int | None]:
    """Return a kernel's tokens per block, its warps, and its maximum registers per thread."""
    if name in WIDE:
        return WIDE_BLOCK, WIDE_WARPS, None
    block = cuda_paths.LANES if name in OF_TREES else BLOCK
    return block, 1, REGISTERS if name in OF_ROWS else None


def warm_up(like: torch.Tensor) -> None:
    """Compile the kernels for logits [.., vocab] of this type, width and stride."""
    logits = like.new_zeros(2, like.stride(0))[:, : like.shape[1]]
    mask_rows(logits, np.zeros(1, np.int64), np.full((1, -(-like.shape[1] // 32)), -1, np.int32))
    params = [SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=1.0)]
    rows = make_rows(params, [0, 0])
    CudaRows(logits).own_tokens(rows)()
    target, which = CudaRows(logits), np.zeros(1, np.int64)
    found, _ = target.distributions(rows)(which, which[:, None])
    target.draw(found, which, Edits(which, which, np.ones(1)), np.full(1, 0.5))
    firsts, parents, halves = np.array([0, 1]), np.full(1, -1, np.int32), np.full(2, 0.5)
    drafted = Drafted(firsts, parents, np.ones(1, np.bool_), np.zeros((1, 2), np.int64), np.ones((1, 1)), halves[:1])
    trees = Trees(firsts, parents, which)
    for judged in (target.walk(rows, drafted, halves), target.longest(rows, rows, trees, Bars(halves, halves))):
        assert judged is not None
        judged()


class Pass:
    """The kernels' results for some rows of a target.

    The target holds this object, but this object does not hold the target. So the logits are freed with their last
    user.

    - `words`: the rows, on the device.
    - `distributions`: f64[rows, 4], as in `Distributions`.
    """

    def __init__(self, target: CudaRows, rows: Rows) -> None:
        self.rows, self._grid, self._wide = rows, (len(rows), target.splits), WIDE_ROOM * target.splits
        self.words = to_device(rows.view(np.int64), target.logits.device)
        # Until `find_distributions` these are placeholders of the right type.
        self._heads, self._head_ids, self.distributions = _nothing(target.logits.device)
        self._counts = self._is_in_heads = self._head_ids
        self._has_some = self._has_all = False
        self.is_ranked = bool((((rows["top_k"] > 0) | (rows["top_p"] < 1)) & (rows["temperature"] > 0)).any())

    def find_distributions(self, target: CudaRows, *, of_all: bool) -> None:
        """Run `heads_kernel` and `distributions_kernel`, unless that is done.

        They run on all rows, or on the rows with top-k or top-p.
        """
        if self._has_all or (self._has_some and not of_all):
            return
        self._has_some, self._has_all = True, of_all
        num_rows, splits = self._grid
        sums = target.empty((num_rows, splits, 3), torch.float64)
        counts = target.empty((num_rows * (splits + 1),), torch.int32)
        self._counts, self._is_in_heads = counts[num_rows:], counts[:num_rows]
        self.distributions = weights = target.empty((num_rows, 4), torch.float64)
        columns, heights = self.words, self._counts  # not used in that case
        if self.is_ranked:
            columns = target.empty((*self._grid, ROOM, BLOCK), torch.int64)
            heights = target.empty((*self._grid, BLOCK), torch.int32)
            self._heads, self._head_ids, weights = (
                target.empty((num_rows, self._wide), dtype) for dtype in (torch.float32, torch.int32, torch.float64)
            )
        rows, every = (self.words, *target.tops, self._counts), int(of_all)
        target.run("heads", self._grid, *rows, columns, heights, ROOM, sums, every)
        if self.is_ranked:
            gathered = self._counts, columns, heights, ROOM, self._wide
            target.run("weigh", self._grid, self.words, *gathered, self._heads, self._head_ids, weights, sums)
        found = self.distributions, self._is_in_heads, every
        target.run("distributions", (num_rows, 1), *rows, self._wide, self._heads, weights, sums, *found)

    def look_up(self, target: CudaRows, which: Int64Array, token_ids: Int64Array) -> Fetched:
        """Run `probs_kernel` after `find_distributions` of all rows, and return f64[n, c] as `LookUp` does."""
        num, width = token_ids.shape
        probs = target.empty((num, width), torch.float64)
        if num:
            asked = to_device(np.concatenate((which, token_ids.ravel())), target.logits.device)
            target.run("probs", (num, 1), self.words, self.distributions, asked, asked[num:], width, probs)
        return Fetched(probs)

    def choose(
        self, target: CudaRows, best: torch.Tensor, which: torch.Tensor | None = None, words: torch.Tensor | None = None
    ) -> None:
        """Run `choose_kernel`. With top-k or top-p, call `find_distributions` first.

        best i32[2, parts, rows] receives the bits of each part's largest scores, and their tokens. `which` i32[n]
        selects rows, and `words` replaces the rows' words, if given.
        """
        of_rows = self.words if words is None else words, *target.tops, target.top_ids
        heads = self._counts, self._heads, self._head_ids, self._wide
        found = self.distributions, self._is_in_heads, best[0].view(torch.float32), best[1]
        some = self._counts if which is None else which, which is not None
        target.run("choose", (best.shape[2], best.shape[1]), *of_rows, *heads, *found, *some)


@cache
def _nothing(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.float64))


@cache
def _programs(device: torch.device) -> int:
    """Return how many programs of one warp the device runs at a time."""
    return PROGRAMS * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)
