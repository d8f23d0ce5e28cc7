"""Suffix decoding: what followed the end of a text where it stood before, in this text or in others.

    reference     the tree and its drafts in plain Python, which explains them
    compiled      the same in C
    source        drafts inside a verifier; text_drafts: what it shares with lookahead decoding; shared_texts: texts of
                  ended jobs
    ngram         a drafter for draft workers
    texts         the texts of many sessions: one call drafts for all

In: token ids. Out: trees of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specq.drafting.suffix.compiled import CompiledMatcher, kernels
from specq.drafting.suffix.reference import DEPTH, MOST_NODES, MOST_TREES, DraftedSuffix, ReferenceMatcher
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
    """How often each short sequence of tokens stood in some texts, and what followed it."""

    @property
    def num_tokens(self) -> int:
        """The tokens of all texts, and one for the end of each."""
        ...

    @property
    def num_nodes(self) -> int: ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the last text."""
        ...

    def end_text(self) -> None:
        """End the last text; what is appended next is another one."""
        ...


def make_tree(*, is_compiled: bool = True) -> SuffixTree:
    """Return a tree of no text; `is_compiled`: False for the reference."""
    found = kernels() if is_compiled else None
    return ReferenceMatcher() if found is None else CompiledMatcher(found)


def make_texts(*, is_compiled: bool = True) -> SuffixTexts:
    """Return no texts yet; `is_compiled`: as of `make_tree`."""
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
    """Return what may follow a text that ends with `tail`: at most `most` nodes, at most `most_depth` deep, of each at
    most `fan_out` children; none likelier to be left out than `floor`. Of trees that know as long an end of it, the
    earlier count first; all are of one kind, and at most MOST_TREES."""
    found: DraftedSuffix = type(trees[0]).draft(trees, tail[-DEPTH:], min(most, MOST_NODES), most_depth, fan_out, floor)
    return found


__all__ = [
    "DEPTH",
    "MOST_NODES",
    "MOST_TREES",
    "NO_TEXT",
    "TOO_OLD",
    "DraftedSuffix",
    "NotReady",
    "Requests",
    "SuffixTexts",
    "SuffixTree",
    "TextDrafts",
    "draft",
    "make_texts",
    "make_tree",
]
