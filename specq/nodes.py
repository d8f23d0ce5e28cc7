"""Draft nodes as the verifier keeps them, and how a choice of them becomes arrays.

Siblings are judged sampled ones first, in the order in which they were drawn, then point masses; the chance that a node is
accepted counts on all before it having failed. So beside sampled siblings no node is likelier than those before it, and a cut
by chance takes the last first. `probabilistic` is exact only if a sampled node is cut without looking at its own token
(decision 0008): its chance is computed from the draft distribution and from what was drawn before, never from what a drafter
says of it, and `depends_on` names the last node whose token the scheduler must know before it may count on this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from specq.messages import Draft
from specq.types import NO_TREE, DraftLaws, Float32Array, Float64Array, Int32Array, Law, Tree, UInt16Array

LIVE, CUT = -1, -2
_DOWN: Int32Array = np.arange(-1, 1024, dtype=np.int32)  # the parents of a chain's nodes


class Chain(NamedTuple):
    """Point masses that follow one another below the committed context, and hang from no tree.

    token_ids i32[n]; scores f32[n]: log-probabilities given the parent; reach f64[n]: probability that each is accepted
    """

    token_ids: Int32Array
    scores: Float32Array
    reach: Float64Array

    def tree(self, length: int) -> Tree:
        """Return its first nodes."""
        return Tree(self.token_ids[:length], _DOWN[:length], self.scores[:length])


class Node:
    """A draft node in the tree; `position` is the one that its token would take. `law` is None for a point mass, `rank`
    the place of a sampled node in the order in which its family was drawn, `claim` what its score was made of. `stands` is LIVE, CUT, or for a node that was
    committed the length of the transcript that it ends. `depends_on` is the last sampled node before it among its siblings,
    or else above it: without that one's token neither its chance is known nor whether it is there at all."""

    __slots__ = (
        "arrived", "children", "claim", "depends_on", "lane", "law", "node_id", "parent", "position", "rank", "reach",
        "score", "stands", "token",
    )  # fmt: skip

    def __init__(
        self, lane: int, node_id: int, token: int, parent: Node | None, position: int, score: float, arrived: float
    ) -> None:
        self.lane, self.node_id, self.token, self.parent = lane, node_id, token, parent
        self.position, self.score, self.arrived = position, score, arrived
        self.law: Law | None = None
        self.rank, self.claim = 0, score
        self.children: dict[int, Node] = {}
        self.reach = 0.0  # probability of being accepted, set by `Session.candidates`, as is the next
        self.depends_on: Node | None = None
        self.stands = LIVE

    def draw(self, law: Law, rank: int, drawn: Node, chance: float) -> None:
        """Become the node that was drawn; children stay. `chance` is that of earlier nodes with its claim to be accepted:
        only more than the claim counts, lest a few bad drafts keep all later ones from being tried."""
        self.law, self.rank, self.lane, self.node_id = law, rank, drawn.lane, drawn.node_id
        self.claim, self.score = drawn.score, max(drawn.score, math.log(chance))

    def cut(self) -> int:
        """Cut this node and what hangs from it; return how many nodes that are."""
        num_cut, ending = 0, [self]
        while ending:
            node = ending.pop()
            node.stands = CUT
            num_cut += 1
            ending += node.children.values()
        return num_cut


def laws_of(draft: Draft) -> list[Law | None]:
    """Return the law of each node of a draft whose laws are well-formed; None for point masses."""
    size = draft.q_size
    if not size:
        return [None] * len(draft.token_ids)
    laws = [
        Law(ids, weights)
        for ids, weights in zip(draft.q_ids.reshape(-1, size), draft.q_weights.reshape(-1, size), strict=True)
    ]
    return [laws[row] if row >= 0 else None for row in draft.q_rows.tolist()]


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


def in_order(siblings: Iterable[Node]) -> list[Node]:
    """Return siblings in the order of judgement."""
    nodes = list(siblings)
    if any(node.law is not None for node in nodes):
        nodes.sort(key=lambda node: (node.law is None, node.rank))
    return nodes


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


def best_chain(nodes: Sequence[Node], most: int) -> list[Node]:
    """Return the chain of at most `most` nodes that promises the most accepted tokens, for engines that take no trees.

    `nodes` are a session's candidates, with `reach` set, parents before children, siblings in the order of judgement. Of
    siblings that were drawn, the first stands for all; and what a chain promises counts only as far as its first drawn
    node. Which nodes are taken must not depend on their own tokens, nor on what hangs from these.
    """
    depths = {0: 0}  # by identity, 0 for the context
    families: dict[int, list[Node]] = {}
    for node in nodes:
        above = 0 if node.parent is None else id(node.parent)
        if depths.get(above, most) < most:
            depths[id(node)] = depths[above] + 1
            families.setdefault(above, []).append(node)
    promises = dict.fromkeys(depths, 0.0)  # of the chain below each
    following: dict[int, Node] = {}
    for above, family in reversed(families.items()):
        eligible = family if family[0].law is None else family[:1]
        node = following[above] = max(eligible, key=lambda node: node.reach + promises[id(node)])
        promises[above] = node.reach + (promises[id(node)] if node.law is None else 0.0)
    chain: list[Node] = []
    while (end := id(chain[-1]) if chain else 0) in following:
        chain.append(following[end])
    return chain


def tree_of(nodes: Sequence[Node]) -> Tree:
    """Return chosen nodes, parents before children and siblings in the order of judgement, as arrays."""
    if not nodes:
        return NO_TREE
    index = {id(node): i for i, node in enumerate(nodes)}
    parents: Int32Array = np.array([-1 if n.parent is None else index[id(n.parent)] for n in nodes], np.int32)
    return Tree(
        token_ids=np.array([n.token for n in nodes], np.int32),
        parents=parents,
        scores=np.array([n.score for n in nodes], np.float32),
        laws=_laws_of_tree(nodes),
    )


def _laws_of_tree(nodes: Sequence[Node]) -> DraftLaws | None:
    laws = {id(node.law): node.law for node in nodes if node.law is not None}
    if not laws:
        return None
    row_of = {key: row for row, key in enumerate(laws)}
    rows = [-1 if node.law is None else row_of[id(node.law)] for node in nodes]
    return DraftLaws(*_stacked(list(laws.values())), np.array(rows, np.int32))


def pack_laws(laws: Sequence[Law], rows: Sequence[int]) -> dict[str, Any]:
    """Return the arrays of a `Draft` whose node i was drawn from laws[rows[i]]; -1: a point mass."""
    if not laws:
        return {}
    ids, weights = _stacked(laws)
    return {"q_ids": ids.reshape(-1), "q_weights": weights.reshape(-1), "q_rows": np.array(rows, np.int32)}


def _stacked(laws: Sequence[Law]) -> tuple[Int32Array, UInt16Array]:
    """Return (ids i32[g, k], weights u16[g, k]), padded to the longest law."""
    width = max(len(law.ids) for law in laws)
    ids, weights = np.full((len(laws), width), -1, np.int32), np.zeros((len(laws), width), np.uint16)
    for row, law in enumerate(laws):
        ids[row, : len(law.ids)], weights[row, : len(law.ids)] = law.ids, law.weights
    return ids, weights
