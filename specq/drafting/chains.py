"""Chains of draft nodes: several levels at one call, for proposers that can compute them without coming back to the host.

Narrow on purpose: `expand_chain` equals `depth` calls of `expand`, each of which asks for the children of the first child
that the one before gave. So a drafter may use it wherever it would go straight down, on any proposer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from specq.drafting.interface import Children, Expansion, Proposer


@runtime_checkable
class ChainProposer(Protocol):
    """A proposer that may have chains of its own."""

    @property
    def has_chains(self) -> bool:
        """Whether a chain costs it less than its levels one by one."""
        ...

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        """Answer each request with the children at `depth` levels, those of a level below the first child of the one
        before. A request's child_ids are those of all levels, one level after the other, equally many at each."""
        ...


def expand_chain(proposer: Proposer, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
    """Draft chains as `ChainProposer.expand_chain` does, with any proposer."""
    if depth > 1 and isinstance(proposer, ChainProposer):
        return proposer.expand_chain(requests, depth)
    return chain_by_passes(proposer, requests, depth)


def chain_by_passes(proposer: Proposer, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
    """Draft chains by one `expand` a level; a chain ends early where a node has no children."""
    answers: list[list[Children]] = [[] for _ in requests]
    alive = list(range(len(requests)))
    for level in range(depth):
        asked = [_level(requests[i], level, depth) for i in alive]
        for i, children in zip(alive, proposer.expand(asked), strict=True):
            answers[i].append(children)
        alive = [i for i in alive if len(answers[i][-1].token_ids)]
        if not alive:
            break
    return answers


def _level(request: Expansion, level: int, depth: int) -> Expansion:
    """Return the request for one level of a chain."""
    ids = level_ids(request, depth)
    parent = request.node_id if level == 0 else ids[level - 1][0]
    return Expansion(request.session_id, parent, ids[level])


def level_ids(request: Expansion, depth: int) -> list[tuple[int, ...]]:
    """Return the child ids of each level."""
    width = len(request.child_ids) // depth
    return [request.child_ids[level * width : (level + 1) * width] for level in range(depth)]
