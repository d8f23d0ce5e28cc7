"""The draft distributions that travel with a `Draft`: from its arrays and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.protocol.arrays import Int32Array, UInt16Array
from specq.protocol.messages import Draft
from specq.protocol.types import DraftDistribution


def distributions_of(draft: Draft) -> list[DraftDistribution | None]:
    """Return the law of each node of a draft whose laws are well-formed; None for point masses."""
    size = draft.q_size
    if not size:
        return [None] * len(draft.token_ids)
    distributions = [
        DraftDistribution(ids, weights)
        for ids, weights in zip(draft.q_ids.reshape(-1, size), draft.q_weights.reshape(-1, size), strict=True)
    ]
    return [distributions[row] if row >= 0 else None for row in draft.q_rows.tolist()]


def claims_of(draft: Draft) -> list[float]:
    """Return how likely the nodes of a draft whose laws are well-formed are to be accepted, as log-probabilities.

    Of a point mass it is what the drafter says. Of a sampled node it is the chance that a second draw from its draft
    distribution, without the earlier siblings' tokens, would agree: what an honest drafter starts from, too, but here it
    cannot depend on the node's own token.
    """
    if not draft.q_size:
        return [float(score) for score in draft.scores]
    claims = draft.scores.astype(np.float64)
    ids, left = draft.q_ids.reshape(-1, draft.q_size), draft.q_weights.reshape(-1, draft.q_size).astype(np.float64)
    for nodes in _by_rank(draft.q_rows.tolist()):
        rows = draft.q_rows[nodes]
        weights = left[rows]
        claims[nodes] = np.log((weights**2).sum(1) / weights.sum(1) ** 2)
        left[rows] = np.where(ids[rows] == draft.token_ids[nodes, None], 0.0, weights)
    return list(map(float, claims))


def _by_rank(rows: Sequence[int]) -> list[list[int]]:
    """Return the sampled nodes of a draft, given the rows of their laws: the first of all siblings, then the second, ..."""
    seen: dict[int, int] = {}
    found: list[list[int]] = []
    for node, row in enumerate(rows):
        if row >= 0:
            rank = seen[row] = seen.get(row, -1) + 1
            found += [[]] if rank == len(found) else []
            found[rank].append(node)
    return found


def pack_distributions(distributions: Sequence[DraftDistribution], rows: Sequence[int]) -> dict[str, Any]:
    """Return the arrays of a `Draft` whose node i was drawn from laws[rows[i]]; -1: a point mass."""
    if not distributions:
        return {}
    ids, weights = stacked(distributions)
    return {"q_ids": ids.reshape(-1), "q_weights": weights.reshape(-1), "q_rows": np.array(rows, np.int32)}


def stacked(distributions: Sequence[DraftDistribution]) -> tuple[Int32Array, UInt16Array]:
    """Return (ids i32[g, k], weights u16[g, k]), padded to the longest law."""
    width = max(len(distribution.ids) for distribution in distributions)
    ids, weights = np.full((len(distributions), width), -1, np.int32), np.zeros((len(distributions), width), np.uint16)
    for row, distribution in enumerate(distributions):
        ids[row, : len(distribution.ids)], weights[row, : len(distribution.ids)] = (
            distribution.ids,
            distribution.weights,
        )
    return ids, weights
