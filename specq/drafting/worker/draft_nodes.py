"""A drafter's nodes, how they become a message, and what a drafter learns from their verdicts.

`AcceptanceStats` has the statistics of a drafter over all its sessions: the acceptance of its drafts, and whether
drafting is useful. `judged` selects the verified nodes that the statistics learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from specq.drafting.worker.shapes import Path
from specq.protocol import DraftDistribution, pack_distributions
from specq.verification import Calibration


@dataclass(slots=True, eq=False)
class DraftNode:
    """A drafted node.

    predicted        the drafter's log-probability given the parent.
    score            the same after calibration.
    log_reach_prob   log of the cumulative acceptance probability, counted from where drafting began.
    rank             place among its siblings.
    distribution     what the siblings were drawn from, None for a point mass.
    wire_id          the id that the verifier knows it by. -1: not sent.
    """

    node_id: int
    token: int
    parent: DraftNode | None
    position: int
    rank: int
    predicted: float
    score: float
    log_reach_prob: float
    distribution: DraftDistribution | None
    children: dict[int, DraftNode] = field(default_factory=dict)
    expanded: bool = False
    wire_id: int = -1

    def path(self) -> Path:
        """Return the ranks from the context down to this node."""
        ranks, node = [], self
        while True:
            ranks.append(node.rank)
            if node.parent is None:
                return tuple(ranks[::-1])
            node = node.parent


def distribution_fields(nodes: Sequence[DraftNode]) -> dict[str, Any]:
    """Return the fields of a `Draft` with the draft distributions of its nodes; none if all are point masses.

    Rule: a drawn node is sent with its draft distribution only together with all its earlier siblings, because it was
    drawn from what they left. Otherwise it is sent as a point mass, which is exact, too. So a distribution is included
    if the first of its siblings is.
    """
    distributions = [node.distribution for node in nodes if node.distribution is not None and not node.rank]
    if not distributions:
        return {}
    row_of = {id(distribution): row for row, distribution in enumerate(distributions)}
    rows = [row_of.get(id(node.distribution), -1) for node in nodes]
    return {"q_size": max(map(len, (one.ids for one in distributions))), **pack_distributions(distributions, rows)}


MAX_MISSES = 5  # after this many misses in a row, one pass is made every 2**5 verdicts


@dataclass(slots=True)
class AcceptanceStats:
    """The statistics of sessions of one kind.

    num_misses    misses in a row. A miss is a pass without a node likely enough to be sent.
    is_silenced   whether the newest verdict asks for a higher acceptance probability than any node can have.
    """

    calibration: Calibration = field(default_factory=Calibration)
    num_misses: int = 0
    is_silenced: bool = False

    def count_pass(self, *, is_miss: bool) -> int:
        """Count a pass; return the backoff."""
        self.num_misses = min(self.num_misses + 1, MAX_MISSES) if is_miss else 0
        return self.backoff

    @property
    def backoff(self) -> int:
        """How many verdicts to wait before the next pass: 0 after a good pass, about twice as many after each miss."""
        return int(2**self.num_misses) - 1


class HasParent(Protocol):
    """A node of either side's tree; children of the context have no parent."""

    @property
    def parent(self) -> Self | None: ...


def judged(nodes: Sequence[HasParent], accepted: AbstractSet[int]) -> list[int]:
    """Return the indices of the verified nodes that were judged.

    A node was judged if its parent was accepted and no earlier sibling was. `nodes` has siblings in the order of
    judgement.
    """
    reached: set[int] = {0}  # by identity, 0 for the context
    found: list[int] = []
    for i, node in enumerate(nodes):
        at = 0 if node.parent is None else id(node.parent)
        if at in reached:
            found.append(i)
            if i in accepted:
                reached.discard(at)
                reached.add(id(node))
    return found
