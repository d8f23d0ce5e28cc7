"""The nodes of many sessions side by side, grouped into families: the children of one row, in the order of judgement.

Sampled children come first, in draw order (their order in the tree), then point masses. A family's columns are the tokens
that its judging touches: those of its law, then those of point masses that the law does not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specq.params import SamplingParams
from specq.types import BoolArray, DraftLaws, Int32Array
from specq.verification.packing import JudgedStep, PackedRows

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PackedNodes:
    """The nodes of some steps, step after step.

    token_ids i32[n]; parent_rows i64[n]: the packed row that judges each; positions: where its token would stand
    law_ids i64[n, k], weights f64[n, k]: the law that it was drawn from; is_sampled bool[n]
    first_nodes  the first row of each step -> its first node
    """

    token_ids: Int32Array
    parent_rows: Int64Array
    positions: list[int]
    params: list[SamplingParams]
    is_sampled: BoolArray
    law_ids: Int64Array
    weights: Float64Array
    first_nodes: dict[int, int]

    @staticmethod
    def of(steps: Sequence[JudgedStep], rows: PackedRows) -> PackedNodes:
        """Gather the trees of the steps that `rows` were packed from."""
        trees = [judged.step.tree for judged in steps]
        firsts = np.cumsum([0, *(tree.num_nodes for tree in trees)])
        parent_rows = np.concatenate(
            [tree.parents.astype(np.int64) + first + 1 for tree, first in zip(trees, rows.first_rows, strict=True)]
        )
        law_ids, weights, is_sampled = _gather_laws([tree.laws for tree in trees], firsts)
        return PackedNodes(
            token_ids=np.concatenate([tree.token_ids for tree in trees]),
            parent_rows=parent_rows,
            positions=[rows.positions[row] for row in parent_rows.tolist()],
            params=[rows.params[row] for row in parent_rows.tolist()],
            is_sampled=is_sampled,
            law_ids=law_ids,
            weights=weights,
            first_nodes=dict(zip(rows.first_rows, firsts.tolist(), strict=False)),
        )


def _gather_laws(
    laws: Sequence[DraftLaws | None], firsts: npt.NDArray[np.int_]
) -> tuple[Int64Array, Float64Array, BoolArray]:
    """Return (i64[n, k], f64[n, k], bool[n]): each node's law and whether it was sampled."""
    width = max((of_tree.ids.shape[1] for of_tree in laws if of_tree is not None), default=0)
    law_ids = np.full((firsts[-1], width), -1, np.int64)
    weights = np.zeros((firsts[-1], width))
    is_sampled = np.zeros(firsts[-1], bool)
    for of_tree, first in zip(laws, firsts, strict=False):
        if of_tree is not None:
            sampled = np.flatnonzero(of_tree.rows >= 0)
            rows, size = of_tree.rows[sampled], of_tree.ids.shape[1]
            is_sampled[first + sampled] = True
            law_ids[first + sampled, :size] = of_tree.ids[rows]
            weights[first + sampled, :size] = of_tree.weights[rows]
    return law_ids, weights, is_sampled


@dataclass(frozen=True, slots=True)
class Families:
    """See the module.

    rows i64[f]; token_ids i64[f, columns], -1 where unused; weights f64[f, columns] of the draft law
    of_node i64[n], column i64[n]: each node's family, and the column of its token
    by_rank   the nodes that are judged first, second, ... in their families
    children  row -> its nodes in the order of judgement; of_row: row -> its family
    """

    rows: Int64Array
    token_ids: Int64Array
    weights: Float64Array
    of_node: Int64Array
    column: Int64Array
    by_rank: list[Int64Array]
    children: dict[int, list[int]]
    of_row: dict[int, int]
    first_nodes: dict[int, int]

    @staticmethod
    def of(nodes: PackedNodes) -> Families:
        """Group nodes by the row that judges them."""
        order = np.lexsort((np.arange(len(nodes.token_ids)), ~nodes.is_sampled, nodes.parent_rows))
        rows, starts, family = np.unique(nodes.parent_rows[order], return_index=True, return_inverse=True)
        rank = np.arange(len(order)) - starts[family]
        of_node = np.empty_like(family)
        of_node[order] = family
        token_ids, column = _columns(nodes, of_node, order[starts])
        weights = np.zeros(token_ids.shape)
        weights[:, : nodes.weights.shape[1]] = nodes.weights[order[starts]]
        return Families(
            rows=rows,
            token_ids=token_ids,
            weights=weights,
            of_node=of_node,
            column=column,
            by_rank=[order[rank == r] for r in range(int(rank.max(initial=-1)) + 1)],
            children={row: part.tolist() for row, part in zip(rows.tolist(), np.split(order, starts[1:]), strict=True)}
            if len(rows)
            else {},
            of_row={row: i for i, row in enumerate(rows.tolist())},
            first_nodes=nodes.first_nodes,
        )

    def target_probs(self, probs: torch.Tensor) -> Float64Array:
        """Return f64[families, columns], on the host: the target's probabilities, 0 in unused columns."""
        if not self.token_ids.size:
            return np.zeros(self.token_ids.shape)
        index = torch.from_numpy(np.maximum(self.token_ids, 0)).to(probs.device)
        found: Float64Array = probs[torch.from_numpy(self.rows).to(probs.device)[:, None], index].cpu().numpy()
        return np.where(self.token_ids >= 0, found, 0)


def _columns(nodes: PackedNodes, of_node: Int64Array, eldest: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return (i64[f, columns], i64[n]): the families' tokens, and the column of each node's token."""
    law_ids = nodes.law_ids[eldest]  # [f, k]; of a family without sampled children -1 everywhere
    width = law_ids.shape[1]
    is_named = law_ids[of_node] == nodes.token_ids[:, None]
    column = np.where(is_named.any(1), is_named.argmax(1) if width else 0, -1)
    unnamed = np.flatnonzero(column < 0)
    unnamed = unnamed[np.argsort(of_node[unnamed], kind="stable")]
    family = of_node[unnamed]
    extra = np.arange(len(unnamed)) - np.searchsorted(family, family)
    column[unnamed] = width + extra
    token_ids = np.full((len(eldest), width + int(extra.max(initial=-1)) + 1), -1, np.int64)
    token_ids[:, :width] = law_ids
    token_ids[family, column[unnamed]] = nodes.token_ids[unnamed]
    return token_ids, column
