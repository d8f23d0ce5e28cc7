"""The rows and nodes of some steps, numbered anew, step after step, as arrays that kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specq.protocol import Int32Array, Int64Array, Judgement, SamplingParams, SessionStep
from specq.verification import seeds

# Where a row lies in the packed logits, where its token would stand in the context, and what it is drawn with. The C and
# Triton kernels read it as it is. top_k: 0 for all; log_min_p: -inf for all.
ROW = np.dtype([
    ("logit_row", "<i8"),
    ("position", "<i8"),
    ("seed", "<u8"),
    ("top_k", "<i8"),
    ("top_p", "<f8"),
    ("temperature", "<f4"),
    ("log_min_p", "<f4"),
])  # fmt: skip
Rows = npt.NDArray[np.void]  # of ROW

# The kinds of rows: T = 0; sampled from all tokens; sampled from those that top-k, top-p and min-p keep.
GREEDY, FREE, CUT = range(3)


class JudgedStep(NamedTuple):
    """A step and where its rows begin in the packed logits."""

    step: SessionStep
    first_row: int

    def row_positions(self) -> list[int]:
        """Return the position that each row's token takes: base_len for row 0, one more a generation."""
        positions = [self.step.base_len]
        for parent in self.step.tree.parents.tolist():
            positions.append(positions[parent + 1] + 1)
        return positions


def place(steps: Sequence[SessionStep]) -> list[JudgedStep]:
    """Return the steps that are judged, with their places."""
    placed, first_row = [], 0
    for step in steps:
        if step.judged:
            placed.append(JudgedStep(step, first_row))
            first_row += step.num_judged_rows
    return placed


JudgeSteps = Callable[[Sequence[JudgedStep]], list[Judgement]]


def by_temperature(steps: Sequence[JudgedStep], greedy: JudgeSteps, warm: JudgeSteps) -> list[Judgement]:
    """Have the steps with T = 0 judged by one function, those with T > 0 by another; return judgements in order."""
    is_greedy = [judged.step.params.temperature == 0 for judged in steps]
    if all(is_greedy):
        return greedy(steps)
    if not any(is_greedy):
        return warm(steps)
    of_greedy = iter(greedy([judged for judged, greedily in zip(steps, is_greedy, strict=True) if greedily]))
    of_warm = iter(warm([judged for judged, greedily in zip(steps, is_greedy, strict=True) if not greedily]))
    return [next(of_greedy if greedily else of_warm) for greedily in is_greedy]


def make_rows(
    params: Sequence[SamplingParams], positions: Sequence[int], logit_rows: Sequence[int] | None = None
) -> Rows:
    """Return one row for each of params and positions; by default all that there are."""
    places = range(len(params)) if logit_rows is None else logit_rows
    of_rows = [
        (place, at, p.seed, p.top_k, p.top_p, p.temperature, math.log(p.min_p) if p.min_p else -math.inf)
        for place, at, p in zip(places, positions, params, strict=True)
    ]
    return np.array(of_rows, ROW)


def noise_keys(rows: Rows) -> Int32Array:
    """Return i32[rows, 2]: the keys of the rows' own noise."""
    return seeds.row_keys(rows["seed"], rows["position"], seeds.Domain.GUMBEL)


def by_kind(rows: Rows) -> Iterator[tuple[int, Int64Array, Rows]]:
    """Yield each kind that occurs, which rows are of it, and those rows."""
    is_cut = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["log_min_p"] > -np.inf)
    kinds = np.where(rows["temperature"] == 0, GREEDY, np.where(is_cut, CUT, FREE))
    for kind in sorted(set(kinds.tolist())):
        which = np.flatnonzero(kinds == kind)
        yield kind, which, rows[which]


@dataclass(frozen=True, slots=True)
class Packed:
    """All rows of some steps; first_rows and sizes (numbers of rows) of each step.

    node_rows, parent_rows i64[nodes]   the rows that follow nodes, and those that judge them
    """

    rows: Rows
    first_rows: list[int]
    sizes: list[int]
    node_rows: Int64Array
    parent_rows: Int64Array

    def spans(self) -> list[slice]:
        """Return the nodes of each step."""
        starts = [first - i for i, first in enumerate(self.first_rows)]
        return [slice(start, start + size - 1) for start, size in zip(starts, self.sizes, strict=True)]


def pack(steps: Sequence[JudgedStep]) -> Packed:
    """Return the rows of some steps, at least one."""
    trees = [judged.step.tree for judged in steps]
    sizes = [len(tree.token_ids) + 1 for tree in trees]
    first_rows = [0, *accumulate(sizes)]
    within = np.arange(first_rows.pop())
    within -= np.repeat(first_rows, sizes)
    own = make_rows([j.step.params for j in steps], [j.step.base_len for j in steps], [j.first_row for j in steps])
    rows = own.repeat(sizes)
    rows["logit_row"] += within
    parents = np.concatenate([tree.parents for tree in trees])
    node_rows = np.flatnonzero(within)
    depths = within[node_rows]  # where trees are chains
    if np.array_equal(parents, depths - 2):
        rows["position"] += within
    else:
        rows["position"] = [position for judged in steps for position in judged.row_positions()]
    return Packed(rows, first_rows, sizes, node_rows, node_rows - depths + 1 + parents)


def node_tokens(steps: Sequence[JudgedStep]) -> Int64Array:
    """Return i64[nodes]: the tokens of all nodes of some steps."""
    return np.concatenate([judged.step.tree.token_ids for judged in steps], dtype=np.int64)
