"""How draft distributions become the arrays of a `Draft` or of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.protocol.arrays import Int32Array, UInt16Array
from specq.protocol.types import DraftDistribution


def pack_distributions(distributions: Sequence[DraftDistribution], rows: Sequence[int]) -> dict[str, Any]:
    """Return the arrays of a `Draft` whose node i was drawn from distributions[rows[i]]; -1: a point mass."""
    if not distributions:
        return {}
    ids, weights = stacked(distributions)
    return {"q_ids": ids.reshape(-1), "q_weights": weights.reshape(-1), "q_rows": np.array(rows, np.int32)}


def stacked(distributions: Sequence[DraftDistribution]) -> tuple[Int32Array, UInt16Array]:
    """Return (ids i32[g, k], weights u16[g, k]), padded to the longest distribution."""
    width = max(len(distribution.ids) for distribution in distributions)
    ids, weights = np.full((len(distributions), width), -1, np.int32), np.zeros((len(distributions), width), np.uint16)
    for row, distribution in enumerate(distributions):
        ids[row, : len(distribution.ids)] = distribution.ids
        weights[row, : len(distribution.ids)] = distribution.weights
    return ids, weights
