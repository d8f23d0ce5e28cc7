"""The texts of ended sessions, from which a verifier drafts for later sessions of the same owner.

Rules: only its owner's sessions use a text, because drafts reveal their source, at least by the speed of tokens. The
total size is bounded, in tokens of all owners. No I/O, no clock.

A suffix tree never shrinks. An owner has two trees. When the newer one reaches half the bound, it replaces the older.
Then a new tree begins. If the bound is too small for all, the least recently served owner loses both.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from specq.drafting.suffix import DEPTH as SUFFIX_DEPTH
from specq.drafting.suffix import SuffixTree
from specq.drafting.suffix import make_tree as make_suffix_tree

TOKENS_AT_ONCE = 1024  # tokens that are added between two steps
NODES_A_TOKEN = 4  # nodes per token beyond which a tree counts as having more tokens
# minimum size of an owner in tokens: an empty tree has room for this number, and clients may name any number of owners
LEAST = 256


class Ended(NamedTuple):
    """A text that is not added yet."""

    owner: str
    token_ids: list[int]


class SharedTexts:
    """The texts of all owners; `max_tokens` 0: keep none."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._owners: OrderedDict[str, list[SuffixTree]] = (
            OrderedDict()
        )  # the newer tree first; the owner that was served last comes last
        self._ended: deque[Ended] = deque()
        self._place = 0  # in the first text of the queue
        self._num_waiting = 0
        self._sizes: dict[str, int] = {}  # of the owners' trees
        self.num_tokens = 0  # total size, as counted against the bound

    @property
    def num_owners(self) -> int:
        return len(self._owners)

    def trees(self, owner: str) -> Sequence[SuffixTree]:
        """Return the trees of an owner, the newer first."""
        found = self._owners.get(owner, ())
        if found:
            self._owners.move_to_end(owner)
        return found

    def add(self, owner: str, token_ids: Sequence[int], prompt_len: int) -> None:
        """Queue the generated text of a session, with its prompt's end as context."""
        text = list(token_ids[max(prompt_len - SUFFIX_DEPTH, 0) :]) if len(token_ids) > prompt_len else []
        if not text or len(text) > self.max_tokens // 2 or self._num_waiting + len(text) > self.max_tokens:
            return
        self._ended.append(Ended(owner, text))
        self._num_waiting += len(text)

    def grow(self) -> None:
        """Add a part of the queued texts."""
        if not self._ended:
            return
        owner, token_ids = self._ended[0]
        trees = self._owners.setdefault(owner, [make_suffix_tree()])
        some = token_ids[self._place : self._place + TOKENS_AT_ONCE]
        trees[0].extend(some)
        self._place += len(some)
        if self._place == len(token_ids):
            trees[0].end_text()
            self._ended.popleft()
            self._num_waiting -= self._place
            self._place = 0
            self._make_room(owner)

    def _make_room(self, owner: str) -> None:
        trees = self._owners[owner]
        if _size(trees[0]) > self.max_tokens // 2:
            trees[:] = [make_suffix_tree(), trees[0]]
        self._measure(owner)
        while self.num_tokens > self.max_tokens and len(self._owners) > 1:
            other = next(other for other in self._owners if other != owner)
            del self._owners[other]
            self._measure(other)
        while self.num_tokens > self.max_tokens and len(trees) > 1:
            trees.pop()
            self._measure(owner)

    def _measure(self, owner: str) -> None:
        """Update the size of an owner's trees."""
        self.num_tokens -= self._sizes.pop(owner, 0)
        if owner in self._owners:
            size = max(sum(map(_size, self._owners[owner])), min(LEAST, self.max_tokens))
            self._sizes[owner] = size
            self.num_tokens += size


def _size(tree: SuffixTree) -> int:
    return max(tree.num_tokens, tree.num_nodes // NODES_A_TOKEN)
