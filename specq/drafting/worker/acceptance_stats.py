"""Statistics of a drafter over all its sessions: the acceptance of its drafts, and whether drafting is useful.

`judged` selects the verified nodes that the statistics learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol, Self

from specq.verification import Calibration

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
