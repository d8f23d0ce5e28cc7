"""Drafted nodes of a drafter that keeps only the tokens that lead to each node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specq.drafting.interface import CONTEXT, Expansion


class DraftPaths(dict[int, tuple[int, ...]]):
    """One session's nodes: for each id, the tokens from the context to the node; the context's own path is empty."""

    def __init__(self) -> None:
        super().__init__({CONTEXT: ()})

    def add(self, request: Expansion, token_ids: Iterable[int]) -> None:
        """Store the children that answered a request."""
        path = self[request.node_id]
        self.update((child_id, (*path, token)) for child_id, token in zip(request.child_ids, token_ids, strict=False))

    def commit(self, token_ids: Sequence[int], path: Sequence[int]) -> None:
        """Keep the nodes that stay valid; see `Drafter.commit`."""
        depth, tokens = len(token_ids), tuple(token_ids)
        kept = list(self.items()) if len(path) == depth else []
        self.clear()
        self.update((i, own[depth:]) for i, own in kept if len(own) > depth and own[:depth] == tokens)
        self[CONTEXT] = ()
