"""The rows and nodes of some steps, renumbered step after step, as arrays for kernels.

`Drafted` has the drafted trees for `probabilistic`: nodes, and the distributions that they were drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from specq.protocol import (
    BoolArray,
    Float64Array,
    Int32Array,
    Int64Array,
    IntpArray,
    Judgement,
    SessionStep,
    UInt16Array,
)
from specq.verification.host_kernels import Rows
from specq.verification.judgements import ends_of, starts_of
from specq.verification.step_batch import StepBatch


class JudgedStep(NamedTuple):
    """A step, and the start of its rows in the packed logits."""

    step: SessionStep
    first_row: int

    def row_positions(self) -> list[int]:
        """Return the position of each row's token: base_len for row 0, one more per generation."""
        positions = [self.step.base_len]
        for parent in self.step.tree.parents.tolist():
            positions.append(positions[parent + 1] + 1)
        return positions


class Placed(Sequence[JudgedStep]):
    """Judged steps with their places. As arrays: `batch`, and first_rows i64[steps]."""

    def __init__(self, batch: StepBatch, first_rows: Int64Array) -> None:
        self.batch, self.first_rows = batch, first_rows

    @staticmethod
    def of(steps: Sequence[JudgedStep]) -> Placed:
        """Return the same as arrays."""
        if isinstance(steps, Placed):
            return steps
        first_rows = np.array([judged.first_row for judged in steps], np.int64)
        return Placed(StepBatch.of([judged.step for judged in steps]), first_rows)

    @property
    def num_rows(self) -> int:
        """Return the number of packed logit rows up to the last step's end."""
        return int(self.first_rows[-1] + self.batch.num_nodes[-1]) + 1 if len(self) else 0

    def take(self, places: IntpArray) -> Placed:
        """Return some of the steps."""
        return Placed(self.batch.take(places), self.first_rows[places])

    def __len__(self) -> int:
        return len(self.batch)

    def __iter__(self) -> Iterator[JudgedStep]:
        return map(JudgedStep, self.batch, self.first_rows.tolist())

    @overload
    def __getitem__(self, index: int) -> JudgedStep: ...
    @overload
    def __getitem__(self, index: slice) -> Placed: ...
    def __getitem__(self, index: int | slice) -> JudgedStep | Placed:
        if isinstance(index, slice):
            return Placed(self.batch[index], self.first_rows[index])
        return JudgedStep(self.batch[index], int(self.first_rows[index]))


def place(steps: Sequence[SessionStep]) -> Placed:
    """Return the judged steps with their places."""
    batch = StepBatch.of(steps).judged()
    if not len(batch.parents):
        return Placed(batch, np.arange(len(batch)))
    sizes = batch.num_nodes + 1
    return Placed(batch, starts_of(sizes))


JudgeSteps = Callable[[Sequence[JudgedStep]], Sequence[Judgement]]


def by_temperature(steps: Sequence[JudgedStep], greedy: JudgeSteps, warm: JudgeSteps) -> Sequence[Judgement]:
    """Judge steps with T = 0 by `greedy`, those with T > 0 by `warm`. Return the judgements in order."""
    placed = Placed.of(steps)
    is_greedy = placed.batch.sampling["temperature"] == 0
    if is_greedy.all():
        return greedy(steps)
    if not is_greedy.any():
        return warm(steps)
    of_greedy = iter(greedy(placed.take(np.flatnonzero(is_greedy))))
    of_warm = iter(warm(placed.take(np.flatnonzero(~is_greedy))))
    return [next(of_greedy if greedily else of_warm) for greedily in is_greedy.tolist()]


@dataclass(frozen=True, slots=True)
class Packed:
    """All rows of some steps.

    - `first_rows`, `sizes`: i64[steps], first row and number of rows of each step.
    - `node_rows`, `parent_rows`: i64[nodes], the rows that follow nodes, and the rows that judge them.
    """

    rows: Rows
    first_rows: Int64Array
    sizes: Int64Array
    node_rows: Int64Array
    parent_rows: Int64Array

    @property
    def first_nodes(self) -> Int64Array:
        """Return the start of each step's nodes, and the end of the last, i64[steps + 1]."""
        found: Int64Array = np.append(self.first_rows, len(self.rows)) - np.arange(len(self.first_rows) + 1)
        return found


NO_NODES: Int64Array = np.zeros(0, np.int64)


def pack(steps: Sequence[JudgedStep]) -> Packed:
    """Return the rows of at least one step."""
    placed = Placed.of(steps)
    batch = placed.batch
    if not len(batch.parents):
        count = len(batch)
        rows = batch.sampling.copy()
        rows["logit_row"], rows["position"] = placed.first_rows, batch.base_lens
        first_rows = np.arange(count + 1)
        return Packed(rows, first_rows[:-1], first_rows[1:] - first_rows[:-1], NO_NODES, NO_NODES)
    sizes = batch.num_nodes + 1
    ends = ends_of(sizes)
    first_rows = ends - sizes
    within = np.arange(ends[-1]) - first_rows.repeat(sizes)
    rows = batch.sampling.repeat(sizes)
    rows["logit_row"] = placed.first_rows.repeat(sizes) + within
    node_rows = within.nonzero()[0]
    depths = within[node_rows]  # if the trees are chains
    parent_rows = node_rows - depths + 1 + batch.parents
    rows["position"] = batch.base_lens.repeat(sizes) + _generations(within, node_rows, parent_rows)
    return Packed(rows, first_rows, sizes, node_rows, parent_rows)


def _generations(within: Int64Array, node_rows: Int64Array, parent_rows: Int64Array) -> Int64Array:
    """Return i64[rows]: the number of nodes that lead to each row. For chains it is `within` i64[rows]."""
    if np.array_equal(parent_rows, node_rows - 1):
        return within
    found = np.zeros_like(within)
    while True:
        of_nodes = found[parent_rows] + 1
        if np.array_equal(found[node_rows], of_nodes):
            return found
        found[node_rows] = of_nodes


def node_tokens(steps: Sequence[JudgedStep]) -> Int64Array:
    """Return i64[nodes]: the tokens of all nodes of some steps."""
    return Placed.of(steps).batch.node_tokens.astype(np.int64)


NO_IDS, NO_WEIGHTS = np.zeros((1, 0), np.int32), np.zeros((1, 0), np.uint16)


@dataclass(frozen=True, slots=True)
class Drafted:
    """The nodes of some steps, step after step.

    - `firsts` i64[steps + 1]: the start of each step's nodes, and the end of the last.
    - `parents` i32[n]: as in the step's own tree.
    - `is_sampled` bool[n]: True for a drawn node, False for a point mass.
    - `named` i64[n, k + 1]: the tokens of the node's distribution, then its own. -1: unused place.
    - `weights` f64[n, k]: of that distribution. 0: unused place.
    - `uniforms` f64[n]: the random number for its acceptance.
    """

    firsts: Int64Array
    parents: Int32Array
    is_sampled: BoolArray
    named: Int64Array
    weights: Float64Array
    uniforms: Float64Array

    @staticmethod
    def of(batch: StepBatch, packed: Packed) -> Drafted:
        """Gather the trees of the packed steps. The uniforms are left empty."""
        places, ids, weights = _gather_distributions(batch)
        named = np.empty((len(places), ids.shape[1] + 1), np.int64)
        named[:, :-1], named[:, -1] = ids[places], batch.node_tokens
        return Drafted(
            firsts=packed.first_nodes,
            parents=np.ascontiguousarray(batch.parents, np.int32),
            is_sampled=places > 0,
            named=named,
            weights=weights[places].astype(np.float64),
            uniforms=np.empty(len(places)),
        )


def _gather_distributions(batch: StepBatch) -> tuple[Int64Array, Int32Array, UInt16Array]:
    """Return the draft distribution of each node, i64[n], and all distributions, i32[g, k] and u16[g, k].

    The first distribution is empty. It belongs to nodes that were not drawn.
    """
    places, counts = np.zeros(len(batch.parents), np.int64), batch.num_nodes.tolist()
    found = [
        (i, extra.distributions)
        for i, extra in sorted(batch.extras.items())
        if extra.distributions is not None and len(extra.distributions.rows) == counts[i]
    ]
    if not found:
        return places, NO_IDS, NO_WEIGHTS
    which, distributions = [i for i, _ in found], [own for _, own in found]
    sizes = batch.num_nodes[which]
    before = np.cumsum([1, *(len(own.ids) for own in distributions[:-1])])
    rows = np.concatenate([own.rows for own in distributions])
    has_some = np.zeros(len(batch), np.bool_)
    has_some[which] = True
    places[has_some.repeat(batch.num_nodes)] = np.where(rows >= 0, rows + before.repeat(sizes), 0)
    width = max(own.ids.shape[1] for own in distributions)
    ids = [_padded(own.ids, width, -1) for own in distributions]
    weights = [_padded(own.weights, width, 0) for own in distributions]
    return (
        places,
        np.concatenate([np.full((1, width), -1, np.int32), *ids]),
        np.concatenate([np.zeros((1, width), np.uint16), *weights]),
    )


def _padded(distributions: npt.NDArray[Any], width: int, fill: int) -> npt.NDArray[Any]:
    if distributions.shape[1] == width:
        return distributions
    return np.pad(distributions, ((0, 0), (0, width - distributions.shape[1])), constant_values=fill)
