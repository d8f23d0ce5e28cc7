"""The texts of many sessions, by slot: one call adds the committed tokens, and drafts for all.

Rule: texts in C draft the same as in plain Python, bit by bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specq.drafting.suffix.compiled import DOUBTS_IN_C, CompiledMatcher
from specq.drafting.suffix.reference import MOST_NODES, MOST_TREES, NONE, ReferenceMatcher
from specq.protocol import Float64Array, Int32Array, IntpArray
from specq.runtime import Buffer

NO_TEXT, TOO_OLD, NO_MEMORY = -1, -2, -3  # why a text cannot be drafted for yet: see `NotReady`


class Requests(NamedTuple):
    """A request to draft for n texts.

    slots            [n]: each at most once.
    lengths, limits  i32[slots]: by slot, the number of committed tokens and its maximum. A draft leaves room for one
                     more.
    recent           i32[slots, window]: by slot, the newest tokens. The token at position i is at i % window.
    groups           i32[n]: the group in `others` that a text also drafts from. NONE: none. None: none for all texts.
    others           groups of at most MOST_TREES - 1 trees, all of the same kind as the texts'.
    fan_out, floor   as in `draft`.
    """

    slots: IntpArray
    lengths: Int32Array
    limits: Int32Array
    recent: Int32Array
    groups: Int32Array | None
    others: Sequence[Sequence[Any]]
    fan_out: int
    floor: float


class TextDrafts(NamedTuple):
    """What may follow n texts. The next call for drafts overwrites it.

    sizes                i32[n]: the number of nodes of each text.
    token_ids, parents   i32[all]: as in `DraftedSuffix`.
    scores               f64[all]: the log-probability of each node given its parent.
    """

    sizes: Int32Array
    token_ids: Int32Array
    parents: Int32Array
    scores: Float64Array


class NotReady(NamedTuple):
    """Why some of n texts cannot be drafted for, i32[n].

    NO_TEXT: it must be opened. TOO_OLD: it lacks more tokens than `recent` has. NO_MEMORY: leave it alone.
    """

    reasons: Int32Array


class SuffixTexts(Protocol):
    """Texts by slot. Slots are small numbers."""

    def open(self, slot: int, most_nodes: int, most_depth: int) -> None:
        """Open a text, whose drafts have at most `most_nodes` <= MOST_NODES nodes and `most_depth` levels."""
        ...

    def leave(self, slot: int) -> None:
        """Draft nothing for a slot until it is closed; its text is forgotten."""
        ...

    def close(self, slot: int) -> bool:
        """Forget a slot; return whether it had a text."""
        ...

    def __contains__(self, slot: int) -> bool:
        """Return whether a slot has a text."""
        ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Add the tokens that a text lacks; `token_ids` begins with the text."""
        ...

    def draft(self, requests: Requests) -> TextDrafts | NotReady:
        """Add committed tokens to texts, and return what may follow each, if all are ready."""
        ...


class ReferenceTexts:
    """Texts in plain Python. See `SuffixTexts`."""

    def __init__(self) -> None:
        # With the maximum nodes and levels; None: it gets no drafts.
        self._texts: dict[int, tuple[ReferenceMatcher, int, int] | None] = {}

    def open(self, slot: int, most_nodes: int, most_depth: int) -> None:
        """See `SuffixTexts.open`."""
        self._texts[slot] = ReferenceMatcher(), most_nodes, most_depth

    def leave(self, slot: int) -> None:
        """See `SuffixTexts.leave`."""
        self._texts[slot] = None

    def close(self, slot: int) -> bool:
        """See `SuffixTexts.close`."""
        return self._texts.pop(slot, None) is not None

    def __contains__(self, slot: int) -> bool:
        return self._texts.get(slot) is not None

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """See `SuffixTexts.extend`."""
        text = self._texts[slot]
        assert text, f"slot {slot} has no text"
        text[0].extend(token_ids[text[0].num_tokens :])

    def draft(self, requests: Requests) -> TextDrafts | NotReady:
        """See `SuffixTexts.draft`."""
        slots = requests.slots.tolist()
        reasons = [self._take_in(slot, int(requests.lengths[slot]), requests.recent) for slot in slots]
        if any(reasons):
            return NotReady(np.array(reasons, np.int32))
        groups = [NONE] * len(slots) if requests.groups is None else requests.groups.tolist()
        drafts = [self._draft(slot, group, requests) for slot, group in zip(slots, groups, strict=True)]
        nodes = [node for one in drafts for node in one]
        return TextDrafts(
            np.array(list(map(len, drafts)), np.int32),
            np.array([token for token, _, _ in nodes], np.int32),
            np.array([parent for _, parent, _ in nodes], np.int32),
            np.array([math.log(prob) for _, _, prob in nodes], np.float64),
        )

    def _take_in(self, slot: int, length: int, recent: Int32Array) -> int:
        if slot not in self._texts:
            return NO_TEXT
        text = self._texts[slot]
        if text is None:
            return 0
        window, taken = recent.shape[1], text[0].num_tokens
        if length - taken > window:
            return TOO_OLD
        text[0].extend(recent[slot, np.arange(taken, length) % window].tolist())
        return 0

    def _draft(self, slot: int, group: int, requests: Requests) -> list[tuple[int, int, float]]:
        """Return (token, parent, probability) of each node."""
        text = self._texts[slot]
        if text is None:
            return []
        tree, most_nodes, most_depth = text
        trees = [tree, *(requests.others[group] if group != NONE else ())]
        room = min(most_depth, int(requests.limits[slot] - requests.lengths[slot]) - 1)
        drafted = ReferenceMatcher.draft(trees, tree.tail(), most_nodes, room, requests.fan_out, requests.floor)
        return list(zip(*drafted, strict=True))


# `Text` of kernels/suffix.c.
TEXT = np.dtype([("tree", np.uintp), ("most_nodes", np.int32), ("most_depth", np.int32)])


class CompiledTexts:
    """Texts in C. See `SuffixTexts`."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        self._trees: dict[int, CompiledMatcher] = {}
        self._nothing = CompiledMatcher(kernels)  # for a text that gets no drafts
        self._texts = np.zeros(0, TEXT)  # by slot
        self._slots, self._groups, self._sizes, self._token_ids, self._parents = (Buffer(np.int32) for _ in range(5))
        self._scores = Buffer(np.float64)
        self._columns = [_Column() for _ in range(4)]

    def open(self, slot: int, most_nodes: int, most_depth: int) -> None:
        """See `SuffixTexts.open`."""
        tree = CompiledMatcher(self._kernels)
        self._put(slot, tree, min(most_nodes, MOST_NODES), most_depth)
        self._trees[slot] = tree

    def leave(self, slot: int) -> None:
        """See `SuffixTexts.leave`."""
        self._put(slot, self._nothing, 0, 0)
        self._trees.pop(slot, None)

    def close(self, slot: int) -> bool:
        """See `SuffixTexts.close`."""
        if slot < len(self._texts):
            self._texts[slot] = 0, 0, 0
        return self._trees.pop(slot, None) is not None

    def __contains__(self, slot: int) -> bool:
        return slot in self._trees

    def _put(self, slot: int, tree: CompiledMatcher, most_nodes: int, most_depth: int) -> None:
        self._make_room(slot + 1)
        self._texts[slot] = tree.address, most_nodes, most_depth

    def _make_room(self, num_slots: int) -> None:
        if num_slots > len(self._texts):
            self._texts = np.concatenate([self._texts, np.zeros(num_slots, TEXT)])

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """See `SuffixTexts.extend`."""
        tree = self._trees[slot]
        tree.extend(token_ids[tree.num_tokens :])

    def draft(self, requests: Requests) -> TextDrafts | NotReady:
        """See `SuffixTexts.draft`."""
        slots, lengths, limits, recent, groups, others, fan_out, floor = requests
        count = len(slots)
        self._make_room(len(lengths))
        sizes = self._sizes.room(count)
        for buffer in (self._token_ids, self._parents, self._scores):
            buffer.room(MOST_NODES * count)
        texts, *columns = map(_Column.address_of, self._columns, (self._texts, lengths, limits, recent))
        found: int = self._kernels.suffix_draft_texts(
            texts, count, self._slots.take(slots, count), None if groups is None else self._groups.take(groups, count),
            *columns, recent.shape[1], _in_c(others), fan_out, floor, DOUBTS_IN_C,
            self._sizes.address, self._token_ids.address, self._parents.address, self._scores.address,
        )  # fmt: skip
        if found < 0:
            return NotReady(np.minimum(sizes, 0))
        return TextDrafts(sizes, self._token_ids.array[:found], self._parents.array[:found], self._scores.array[:found])


class _Column:
    """The address of an array that is mostly the same as before."""

    def __init__(self) -> None:
        self._array, self._address = np.zeros(0), 0

    def address_of(self, array: Any) -> int:
        if array is not self._array:
            self._array, self._address = array, array.ctypes.data
        return self._address


def _in_c(others: Sequence[Sequence[CompiledMatcher]]) -> Any:
    """Return the addresses of groups of trees; all groups have the same number of places."""
    if not others:
        return None
    groups = ((ctypes.c_void_p * (MOST_TREES - 1)) * len(others))()
    for group, trees in zip(groups, others, strict=True):
        group[: len(trees)] = [tree.address for tree in trees]
    return groups
