"""Suffix decoding: draft what followed the same suffix earlier, in this text or in others.

    reference     the tree and its drafts in plain Python, which explains them
    compiled      the same in C
    source        drafts inside a verifier
    text_drafts   what `source` shares with lookahead decoding
    shared_texts  texts of ended jobs
    ngram         a drafter for draft workers
    texts         the texts of many sessions: one call drafts for all

In: token ids. Out: trees of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specq.drafting.suffix.compiled import CompiledMatcher, kernels
from specq.drafting.suffix.reference import DEPTH, MOST_NODES, DraftedSuffix, ReferenceMatcher
from specq.drafting.suffix.texts import (
    NO_TEXT,
    TOO_OLD,
    CompiledTexts,
    NotReady,
    ReferenceTexts,
    Requests,
    SuffixTexts,
    TextDrafts,
)


class SuffixTree(Protocol):
    """How often each short sequence of tokens occurred in some texts, and what followed it."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all texts, plus one for the end of each."""
        ...

    @property
    def num_nodes(self) -> int: ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the last text."""
        ...

    def end_text(self) -> None:
        """End the last text; the next tokens begin another one."""
        ...


def make_tree(*, is_compiled: bool = True) -> SuffixTree:
    """Return an empty tree; `is_compiled`: False for the reference."""
    found = kernels() if is_compiled else None
    return ReferenceMatcher() if found is None else CompiledMatcher(found)


def make_texts(*, is_compiled: bool = True) -> SuffixTexts:
    """Return an empty set of texts; `is_compiled` as in `make_tree`."""
    found = kernels() if is_compiled else None
    return ReferenceTexts() if found is None else CompiledTexts(found)


def draft(
    trees: Sequence[Any],
    tail: Sequence[int],
    most: int,
    *,
    most_depth: int = DEPTH,
    fan_out: int = 1,
    floor: float = 0.0,
) -> DraftedSuffix:
    """Return what may follow a text that ends with `tail`.

    most, most_depth, fan_out   maximum nodes, depth, and children of a node.
    floor                       minimum probability of a node.

    If several trees know an equally long suffix, the earlier tree counts first. All trees are of one kind, at most
    MOST_TREES.
    """
    found: DraftedSuffix = type(trees[0]).draft(trees, tail[-DEPTH:], min(most, MOST_NODES), most_depth, fan_out, floor)
    return found


__all__ = [
    "DEPTH",
    "MOST_NODES",
    "NO_TEXT",
    "TOO_OLD",
    "NotReady",
    "Requests",
    "SuffixTexts",
    "SuffixTree",
    "TextDrafts",
    "draft",
    "make_texts",
    "make_tree",
]
