"""Draft trees as tests look at them."""

from __future__ import annotations

from specq.verifier.draft_tree import Node
from specq.verifier.session import Session


def live_nodes(session: Session) -> list[Node]:
    """Return the live nodes of a session, parents first."""
    nodes = list(session.roots.values())
    for node in nodes:  # grows meanwhile
        nodes += node.children.values()
    return nodes
