"""Which of the verified nodes were judged; verifier and drafter learn from only those."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, Self


class HasParent(Protocol):
    """A node of either side's tree; children of the context have no parent."""

    @property
    def parent(self) -> Self | None: ...


def judged(nodes: Sequence[HasParent], accepted: AbstractSet[int]) -> list[int]:
    """Return the indices of the verified nodes that were judged: those whose parent was accepted, up to the accepted
    among their siblings. `nodes` has siblings in the order of judgement."""
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
