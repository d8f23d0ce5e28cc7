"""A drafter's nodes, and how they become a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.drafting.worker.shapes import Path
from specq.protocol import DraftDistribution, pack_distributions


class DraftNode:
    """A drafted node.

    predicted        the drafter's log-probability given the parent.
    score            the same after calibration.
    log_reach_prob   log of the cumulative acceptance probability, counted from where drafting began.
    rank             place among its siblings.
    distribution     what the siblings were drawn from, None for a point mass.
    wire_id          the id that the verifier knows it by. -1: not sent.
    """

    __slots__ = (
        "children", "distribution", "expanded", "log_reach_prob", "node_id", "parent", "position", "predicted", "rank",
        "score",
        "token", "wire_id",
    )  # fmt: skip

    def __init__(
        self, node_id: int, token: int, parent: DraftNode | None, position: int, rank: int, predicted: float
    ) -> None:
        self.node_id, self.token, self.parent, self.position = node_id, token, parent, position
        self.rank, self.predicted = rank, predicted
        self.score = self.log_reach_prob = 0.0
        self.distribution: DraftDistribution | None = None
        self.children: dict[int, DraftNode] = {}
        self.expanded = False
        self.wire_id = -1

    def path(self) -> Path:
        """Return the ranks from the context down to this node."""
        ranks, node = [], self
        while True:
            ranks.append(node.rank)
            if node.parent is None:
                return tuple(ranks[::-1])
            node = node.parent


def draft_fields(nodes: Sequence[DraftNode]) -> dict[str, Any]:
    """Return the fields of a `Draft` with these nodes, parents first; all have their `wire_id`.

    Rule: a drawn node is sent with its draft distribution only together with all its earlier siblings, because it was
    drawn from what they left. Otherwise it is sent as a point mass, which is exact, too.
    """
    distributions, rows = _whole_groups(nodes)
    return {
        "q_size": max((len(distribution.ids) for distribution in distributions), default=0),
        "token_ids": np.array([node.token for node in nodes], np.int32),
        "parent_ids": np.array([-1 if node.parent is None else node.parent.wire_id for node in nodes], np.int32),
        "scores": np.array([min(node.score, 0.0) for node in nodes], np.float16),
        **pack_distributions(distributions, rows),
    }


def _whole_groups(nodes: Sequence[DraftNode]) -> tuple[list[DraftDistribution], list[int]]:
    """Return the draft distributions of the included sibling groups, and each node's row there.

    A group is included if its first node is. The row is -1 for a point mass, and if the first sibling was sent before.
    """
    distributions = [node.distribution for node in nodes if node.distribution is not None and not node.rank]
    row_of = {id(distribution): row for row, distribution in enumerate(distributions)}
    return distributions, [row_of.get(id(node.distribution), -1) for node in nodes]
