"""Drafted trees on a GPU: it finds the accepted nodes and the token after them, so the host waits once.

The rules are those of `specq.verification.strategies.probabilistic` and `specq.verification.longest`, in the kernels of
gpu_kernels/paths.py. This module also defines the memory layout of the Triton kernels' draws.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specq.protocol import Float64Array, Int32Array, Int64Array
from specq.verification.host_kernels import Rows
from specq.verification.judgements import NodePaths
from specq.verification.packing import Drafted
from specq.verification.target_rows import Bars, Distributions, Edits, JudgedPaths, Trees, check_numbers
from specq.verification.transfers import Fetched, to_device

# Of a draw: the place of its row in the logits, its edits, and the numbers that give the row's weights.
# gpu_kernels/rows.py reads words of 8 bytes. top and bound hold float32 values.
DRAW = np.dtype([
    ("logit_row", "<i8"),
    ("first_edit", "<i8"),
    ("end_edit", "<i8"),
    ("temperature", "<f8"),
    ("top", "<f8"),
    ("bound", "<f8"),
    ("uniform", "<f8"),
])  # fmt: skip
WORDS = DRAW.itemsize // 8


def draw_words(distributions: Distributions, which: Int64Array, edits: Edits, uniforms: Float64Array) -> Int64Array:
    """Return i64[n * WORDS + 2 * edits]: n of DRAW, then the edited tokens, then the bits of their weights.

    Arguments as for `TargetRows.draw`.
    """
    rows, num, num_edits = distributions.rows, len(which), len(edits.place)
    words = np.empty(num * WORDS + 2 * num_edits, np.int64)
    draws, of_edits = words[: num * WORDS].view(DRAW), words[num * WORDS :]
    top, bound, mass, _ = distributions.found[which].T
    draws["logit_row"], draws["temperature"] = rows["logit_row"][which], rows["temperature"][which]
    draws["top"], draws["bound"], draws["uniform"] = top, bound, uniforms
    starts = edits.place.searchsorted(np.arange(num + 1))
    draws["first_edit"], draws["end_edit"] = starts[:-1], starts[1:]
    of_edits[:num_edits] = edits.token_ids
    of_edits[num_edits:].view(np.float64)[:] = edits.values * mass[edits.place]
    return words


LANES = 256  # per program: nodes of a session, and tokens of siblings or their distribution


class DeviceRows(Protocol):
    """The required part of `specq.verification.cuda_rows.CudaRows`."""

    logits: torch.Tensor

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def run(self, name: str, grid: tuple[int, int], *arguments: Any) -> None: ...

    def run_draws(self, num: int, drawing: tuple[torch.Tensor, ...], chosen: torch.Tensor) -> None: ...

    def found_of(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]: ...

    def choose_at(self, rows: Rows, warm: Rows, which: torch.Tensor, tokens: torch.Tensor) -> None: ...


def fits(firsts: Int64Array, width: int) -> bool:
    """Return whether a program has enough lanes for each tree and for a distribution of that width."""
    return bool(np.diff(firsts).max(initial=0) + max(width, 1) <= LANES)


def walk(target: DeviceRows, rows: Rows, drafted: Drafted, residuals: Float64Array) -> JudgedPaths:
    """See `TargetRows.walk`."""
    numbers, trees = _put(
        target,
        (drafted.uniforms, residuals),
        (drafted.firsts, drafted.parents, drafted.is_sampled, drafted.named, drafted.weights),
    )
    num, num_nodes, width = len(drafted.firsts) - 1, len(drafted.parents), drafted.weights.shape[1]
    edits = target.empty((2, num * LANES), torch.int64)
    draws, found = target.empty((num, WORDS), torch.int64), target.empty((2 * num + num_nodes,), torch.int32)
    drawing = draws, edits[0], edits[1].view(torch.float64)
    of_rows = target.found_of(rows)
    target.run("walk", (num, 1), *of_rows, numbers, trees, num_nodes, width, *drawing, found, found[2 * num :])
    target.run_draws(num, drawing, found[num:])
    return _Paths(found, drafted.firsts).wait


def longest(target: DeviceRows, rows: Rows, warm: Rows, trees: Trees, bars: Bars) -> JudgedPaths:
    """See `TargetRows.longest`."""
    numbers, of_trees = _put(target, (bars.limits, bars.deltas), (trees.firsts, trees.parents, trees.token_ids))
    num, num_nodes = len(trees.firsts) - 1, len(trees.parents)
    found = target.empty((2 * num + num_nodes,), torch.int32)
    last_rows = target.empty((num,), torch.int32)
    target.run(
        "longest", (num, 1), *target.found_of(warm), numbers, of_trees, num_nodes, last_rows, found, found[2 * num :]
    )
    target.choose_at(rows, warm, last_rows, found[num:])
    return _Paths(found, trees.firsts).wait


def _put(
    target: DeviceRows, numbers: tuple[Float64Array, ...], integers: tuple[npt.NDArray[Any], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy some arrays to the device in one transfer. Return all numbers, f64, and all integers, i32."""
    of_numbers = np.concatenate(numbers, dtype=np.float64)
    of_integers = np.concatenate([array.ravel() for array in integers], dtype=np.int32, casting="unsafe")
    joined = to_device(np.concatenate((of_numbers.view(np.int32), of_integers)), target.logits.device)
    return joined[: 2 * len(of_numbers)].view(torch.float64), joined[2 * len(of_numbers) :]


class _Paths:
    """Paths and the tokens after them, on their way to the host.

    They are in one array i32[2 * steps + nodes]: lengths, tokens, nodes.
    """

    def __init__(self, found: torch.Tensor, firsts: Int64Array) -> None:
        self._found, self._firsts = Fetched(found), firsts

    def wait(self) -> tuple[NodePaths, Int32Array]:
        """Wait for the device, and return the paths and the tokens i32[steps]."""
        found, num = self._found.wait().copy(), len(self._firsts) - 1
        lengths, tokens, nodes = found[:num], found[num : 2 * num], found[2 * num :]
        check_numbers(bool((lengths >= 0).all()))
        return NodePaths(self._firsts[:-1], lengths.astype(np.int64), nodes), tokens
