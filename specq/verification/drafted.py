"""The drafted trees of many sessions, for `probabilistic`: nodes, and the distributions that they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.protocol import BoolArray, Float64Array, Int32Array, Int64Array, UInt16Array
from specq.verification.packing import Packed
from specq.verification.step_batch import StepBatch

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
