"""Draft nodes as the verifier keeps them, and how a choice of them becomes arrays.

Siblings are judged in this order: sampled ones, as they were drawn, then point masses. A node is judged only if all before it
were rejected; its acceptance probability accounts for that. So beside sampled siblings no node is likelier than those before
it, and a cut by probability takes the last first. `probabilistic` is exact only if a sampled node is cut without looking at its
own token (decision 0008): its probability is computed from the draft distribution and from what was drawn before, never from
the drafter's score, and `depends_on` is the last node whose token the scheduler must know before it may count on this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specq.protocol import (
    NO_TREE,
    DraftDistribution,
    DraftDistributions,
    Float32Array,
    Float64Array,
    Int32Array,
    Tree,
    stacked,
)

LIVE, CUT = -1, -2
_DOWN: Int32Array = np.arange(-1, 1024, dtype=np.int32)  # the parents of a chain's nodes


class Chain(NamedTuple):
    """Point masses that follow one another below the committed context, and are on no tree.

    token_ids i32[n]; scores f32[n]: log-probabilities given the parent; reach_prob f64[n]: probability that each is accepted
    """

    token_ids: Int32Array
    scores: Float32Array
    reach_prob: Float64Array

    def tree(self, length: int) -> Tree:
        """Return its first nodes."""
        return Tree(self.token_ids[:length], _DOWN[:length], self.scores[:length])


class Node:
    """A draft node in the tree.

    position      the one that its token would take
    score         log-probability of acceptance given the parent; predicted: the same before acceptance statistics raised it
    distribution  what it was drawn from; None for a point mass; rank: its place in the order of its sibling group's draws
    stands        LIVE, CUT, or of a node that was committed the length of the transcript that it ends
    reach_prob    cumulative acceptance probability; it and `depends_on` are set by `Session.candidates`
    depends_on    the last sampled node before it among its siblings, or else above it: without that one's token neither this
                  node's probability is known nor whether the node exists
    """

    __slots__ = (
        "arrived", "children", "depends_on", "distribution", "lane", "node_id", "parent", "position", "predicted", "rank",
        "reach_prob", "score", "stands", "token",
    )  # fmt: skip

    def __init__(
        self, lane: int, node_id: int, token: int, parent: Node | None, position: int, score: float, arrived: float
    ) -> None:
        self.lane, self.node_id, self.token, self.parent = lane, node_id, token, parent
        self.position, self.score, self.arrived = position, score, arrived
        self.distribution: DraftDistribution | None = None
        self.rank, self.predicted = 0, score
        self.children: dict[int, Node] = {}
        self.reach_prob = 0.0
        self.depends_on: Node | None = None
        self.stands = LIVE

    def draw(self, distribution: DraftDistribution, rank: int, drawn: Node, accept_prob: float) -> None:
        """Become the node that was drawn; children stay.

        `accept_prob` is the measured acceptance of earlier nodes with its prediction. It counts only where it is above the
        prediction; otherwise a few bad drafts would keep all later ones from being tried.
        """
        self.distribution, self.rank, self.lane, self.node_id = distribution, rank, drawn.lane, drawn.node_id
        self.predicted, self.score = drawn.score, max(drawn.score, math.log(accept_prob))

    def cut(self) -> int:
        """Cut this node and what hangs from it; return the number of nodes cut."""
        num_cut, ending = 0, [self]
        while ending:
            node = ending.pop()
            node.stands = CUT
            num_cut += 1
            ending += node.children.values()
        return num_cut


def in_order(siblings: Iterable[Node]) -> list[Node]:
    """Return siblings in the order of judgement."""
    nodes = list(siblings)
    if any(node.distribution is not None for node in nodes):
        nodes.sort(key=lambda node: (node.distribution is None, node.rank))
    return nodes


def best_chain(nodes: Sequence[Node], most: int) -> list[Node]:
    """Return the chain of at most `most` nodes that promises the most accepted tokens, for engines that take no trees.

    Rule: which nodes are taken depends neither on their own tokens nor on what hangs from these. So of sampled siblings only the
    first is eligible, and what a chain promises counts down to its first sampled node.

    `nodes` are a session's candidates, with `reach_prob` set, parents before children, siblings in the order of judgement.
    """
    depths = {0: 0}  # by identity, 0 for the context
    sibling_groups: dict[int, list[Node]] = {}
    for node in nodes:
        above = 0 if node.parent is None else id(node.parent)
        if depths.get(above, most) < most:
            depths[id(node)] = depths[above] + 1
            sibling_groups.setdefault(above, []).append(node)
    promises = dict.fromkeys(depths, 0.0)  # expected tokens of the chain below each
    following: dict[int, Node] = {}
    for above, sibling_group in reversed(sibling_groups.items()):
        eligible = sibling_group if sibling_group[0].distribution is None else sibling_group[:1]
        node = following[above] = max(eligible, key=lambda node: node.reach_prob + promises[id(node)])
        promises[above] = node.reach_prob + (promises[id(node)] if node.distribution is None else 0.0)
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
        distributions=_distributions_of_tree(nodes),
    )


def _distributions_of_tree(nodes: Sequence[Node]) -> DraftDistributions | None:
    distributions = {id(node.distribution): node.distribution for node in nodes if node.distribution is not None}
    if not distributions:
        return None
    row_of = {key: row for row, key in enumerate(distributions)}
    rows = [-1 if node.distribution is None else row_of[id(node.distribution)] for node in nodes]
    return DraftDistributions(*stacked(list(distributions.values())), np.array(rows, np.int32))
