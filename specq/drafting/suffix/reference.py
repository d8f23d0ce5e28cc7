"""Suffix decoding in plain Python: a suffix tree that grows with its texts, and drafts from several trees.

The method is SuffixDecoding (arXiv 2411.04975). kernels/suffix.c gives the same results, bit by bit.

For each sequence of at most DEPTH tokens in a text, the tree holds how often it occurred. A sequence that occurred once
has a node without children, and the text itself has the tokens after it. When the sequence occurs again, the next token
in the text becomes a child node. So a new token adds one or two nodes, and not one for each length.

A prediction uses the suffixes of the text that occurred before, in this or another text, longest first. Each suffix
gets a trust from its length, its count and its number of different followers, as in Witten and Bell's method (1991).
The rest of the probability goes to the next shorter suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NONE, ROOT = -1, 0
DEPTH = 16  # tokens of the longest sequence
CONTEXTS = 12  # contexts of a position that are followed
CHILDREN = 32  # children of a node that are used: the newest
MOST_NODES = 64  # of a draft
MOST_TREES = 4  # of a draft
LEAST_LEFT = 0.02
# DOUBTS: by length of match, how many unseen followers count for each seen one. TRUSTED: the probability that a single
# follower, seen once, follows again. A lane's calibration corrects it. A single token has no trust of its own, but it
# begins longer matches.
TRUSTED = (0.0, 0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.95, 0.95, 0.95)
DOUBTS = tuple(1.0 / max(trusted, 1e-6) - 1.0 for trusted in TRUSTED)


class DraftedSuffix(NamedTuple):
    """A tree of nodes, parents before children.

    It has their tokens, the indices of their parents (NONE: the text's end), and the probability of each given its
    parent.
    """

    token_ids: list[int]
    parents: list[int]
    probs: list[float]


class _Node:
    __slots__ = ("at", "children", "count")

    def __init__(self, at: int) -> None:
        self.count, self.at = 1, at  # how often it occurred, and where it ended last
        self.children: dict[int, _Node] = {}  # by token, the newest last


class ReferenceMatcher:
    """A suffix tree in Python. See `specq.drafting.suffix.SuffixTree`."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # of all texts, with NONE after the end of each
        self.root = _Node(NONE)
        self._active: list[
            tuple[_Node, int]
        ] = []  # known nodes that match the text's end, and their depths, longest first
        self.num_nodes = 1

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """See `SuffixTree.extend`."""
        for token in token_ids:
            self._grow(token)

    def end_text(self) -> None:
        """See `SuffixTree.end_text`."""
        self._tokens.append(NONE)
        self._active = []

    def _grow(self, token: int) -> None:
        """Extend all known sequences at the end of the text by one token."""
        at, active = len(self._tokens), list[tuple[_Node, int]]()
        self._tokens.append(token)
        for node, depth in [*self._active, (self.root, 0)]:
            child = node.children.pop(token, None)
            if child is None:
                self._add(node, token, at)
                continue
            if depth + 1 < DEPTH:
                follows = self._tokens[child.at + 1]
                if not child.children and follows != NONE:
                    self._add(child, follows, child.at + 1)
                active.append((child, depth + 1))
            child.count, child.at = child.count + 1, at
            node.children[token] = child
        self._active = active

    def _add(self, parent: _Node, token: int, at: int) -> None:
        parent.children[token] = _Node(at)
        self.num_nodes += 1

    def begins(self) -> _Context:
        """Return the context of no token."""
        return _Context(self, self.root, NONE, 0)

    def matches(self, tail: Sequence[int]) -> list[_Context]:
        """Return the contexts of the last 1, 2, ... tokens, as long as a token has followed them before."""
        found: list[_Context] = []
        for length in range(1, min(len(tail), DEPTH) + 1):
            context: _Context | None = self.begins()
            for token in tail[len(tail) - length :]:
                context = context and context.step(token)
            if context is None or not context.followers():
                break
            found.append(context)
        return found

    def tail(self) -> list[int]:
        """Return the last tokens of the last text, at most DEPTH."""
        found = self._tokens[-DEPTH:]
        while NONE in found:
            found = found[found.index(NONE) + 1 :]
        return found

    def token_at(self, place: int) -> int:
        """Return a token; NONE at the end of a text."""
        return self._tokens[place] if place < len(self._tokens) else NONE

    @staticmethod
    def draft(
        trees: Sequence[ReferenceMatcher], tail: Sequence[int], most: int, most_depth: int, fan_out: int, floor: float
    ) -> DraftedSuffix:
        """See `specq.drafting.suffix.draft`."""
        return _draft(trees, tail, most, most_depth, fan_out, floor)


class _Context(NamedTuple):
    """A place of a tree that some tokens lead to.

    node None: the sequence occurred once, and the text continues after `at`.
    """

    tree: ReferenceMatcher
    node: _Node | None
    at: int
    depth: int

    def step(self, token: int) -> _Context | None:
        """Return the place that one more token leads to."""
        if self.node is None:
            if self.tree.token_at(self.at + 1) != token:
                return None
            return _Context(self.tree, None, self.at + 1, self.depth + 1)
        child = self.node.children.get(token)
        if child is None:
            return None
        return _Context(self.tree, child if child.children else None, child.at, self.depth + 1)

    def followers(self) -> list[tuple[int, int]]:
        """Return (token, how often it followed), newest first."""
        if self.node is None:
            token = self.tree.token_at(self.at + 1)
            return [] if token == NONE else [(token, 1)]
        return [(token, child.count) for token, child in reversed(self.node.children.items())][:CHILDREN]


def _begin(trees: Sequence[ReferenceMatcher], tail: Sequence[int]) -> list[_Context]:
    """Return the contexts of the text's end, longest first; of equal ones those of earlier trees first."""
    found = [context for tree in trees for context in tree.matches(tail)]
    return sorted(found, key=lambda context: -context.depth)[:CONTEXTS]


def _advance(contexts: Sequence[_Context], token: int, trees: Sequence[ReferenceMatcher]) -> list[_Context]:
    found = [context.step(token) for context in [*contexts, *(tree.begins() for tree in trees)]]
    return [context for context in found if context is not None][:CONTEXTS]


def _predict(contexts: Sequence[_Context], fan_out: int) -> list[tuple[int, float]]:
    """Return (token, probability) of possible next tokens, likeliest first."""
    sums, left = dict[int, float](), 1.0
    for context in contexts:
        if left <= LEAST_LEFT:
            break
        found = context.followers()
        total = sum(count for _, count in found)
        if not total:
            continue
        trust = total / (total + DOUBTS[min(context.depth, DEPTH)] * len(found))
        for token, count in found:
            if token in sums or len(sums) < CHILDREN:
                sums[token] = sums.get(token, 0.0) + left * trust * count / total
        left *= 1 - trust
    return sorted(sums.items(), key=lambda one: -one[1])[:fan_out]


def _draft(
    trees: Sequence[ReferenceMatcher], tail: Sequence[int], most: int, most_depth: int, fan_out: int, floor: float
) -> DraftedSuffix:
    """Add the likeliest candidate node and its candidate children, until there are `most` nodes."""
    drafted = DraftedSuffix([], [], [])
    places = [
        (_begin(trees, tail), 0, 1.0)
    ]  # of the text's end and each node: contexts, depth, probability from the end on
    offers: list[tuple[float, int, int, float]] = []  # that probability, token, parent, probability
    while len(drafted.token_ids) < most:
        contexts, depth, reach = places[-1]
        following = _predict(contexts, fan_out) if depth < most_depth else []
        parent = len(places) - 2
        offers += [(reach * prob, token, parent, prob) for token, prob in following if reach * prob >= floor]
        if not offers:
            break
        reach, token, parent, prob = offers.pop(max(range(len(offers)), key=lambda i: (offers[i][0], -i)))
        above, depth, _ = places[parent + 1]
        places.append((_advance(above, token, trees), depth + 1, reach))
        drafted.token_ids.append(token)
        drafted.parents.append(parent)
        drafted.probs.append(prob)
    return drafted
