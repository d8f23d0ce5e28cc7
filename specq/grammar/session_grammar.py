"""The grammar of one session: it follows the committed tokens, and says what may come next.

Rule: only `commit` advances it. Everything else looks ahead and returns to the same state. So a mask never depends on a
draft that was not accepted.

A token that ends the text (end-of-sequence unless ignored, and the job's stop tokens) may come where the grammar is
complete, and nowhere else. Where a grammar is complete and cannot go on, the text ends without such a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from specq.protocol import BoolArray, EngineError, Int32Array

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_FORCED = 32  # forced tokens that are drafted at a time


class Reached(Enum):
    """What a grammar says of the path to a node."""

    FORBIDDEN = auto()
    ENDED = auto()  # allowed, and the text ends with it
    OPEN = auto()  # allowed, and more may follow
    UNKNOWN = auto()  # some token of it is not known yet


class SessionGrammar:
    """What a session's grammar allows behind its transcript.

    - `has_ended`: the grammar is complete and allows no further token.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end_ids: Sequence[int]) -> None:
        """Take a matcher at its start, and the tokens that end this session's text."""
        vocab = tokenizer.vocab_size
        self._matcher, self._num_bytes = matcher, 4 * ((vocab + 31) // 32)
        self._ends = frozenset(end for end in end_ids if end < vocab)
        self._closed = self._ends.union(tokenizer.eos_tokens)  # the grammar itself may not have them as text
        self._closed_bits, self._end_bits = (_bits(ids, self._num_bytes) for ids in (self._closed, self._ends))
        self.has_ended = False

    @property
    def num_words(self) -> int:
        """The number of 32-bit words of a mask."""
        return self._num_bytes // 4

    def commit(self, token_ids: Sequence[int]) -> int:
        """Follow tokens of the transcript; return how many of them belong to the text.

        The rest lies behind the end. Raises EngineError if the grammar does not allow a token.
        """
        is_end = bool(token_ids) and token_ids[-1] in self._ends
        inner = token_ids[: len(token_ids) - is_end]
        count = self._matcher.try_consume_tokens(list(inner)) if inner else 0
        self.has_ended = self._matcher.is_stopped() and not self._matcher.is_error()
        if count == len(inner):
            return count if self.has_ended else count + is_end
        if self.has_ended:
            return count
        raise EngineError(self.reason() or f"the grammar does not allow token {token_ids[count]}, which was committed")

    def reason(self) -> str:
        """Return why the grammar cannot be followed further, or ""."""
        error = str(self._matcher.get_error()) if self._matcher.is_error() else ""
        return f"the grammar is too complex here: {error.splitlines()[0][:300]}" if error else ""

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int]) -> BoolArray:
        """Return for each node of a tree whether its path is allowed, bool[nodes].

        A negative token is not known yet, and counts as allowed with all that follows it.
        """
        found = [path is not Reached.FORBIDDEN for path in self._walk(token_ids, parents)]
        return np.array(found, np.bool_)

    def fill(self, token_ids: Sequence[int], parents: Sequence[int], masks: Int32Array) -> None:
        """Write the mask of each row of a tree, i32[1 + nodes, words]: of the row before the tree, then of the nodes.

        Rows that the grammar does not reach allow everything, so that other parameters leave something too.
        """
        masks[:] = -1
        are_complete = {0: self._mask(masks[0])}
        for row, path in enumerate(self._walk(token_ids, parents), 1):
            if path is Reached.OPEN:
                are_complete[row] = self._mask(masks[row])
        self._close(masks, are_complete)

    def forced(self, token_ids: Sequence[int] = ()) -> list[int]:
        """Return the only tokens that the grammar allows behind a path, at most MAX_FORCED; [] if the path is not."""
        count = self._matcher.try_consume_tokens(list(token_ids)) if token_ids else 0
        found: list[int] = []
        if count == len(token_ids) and not self._matcher.is_stopped():
            found = self._matcher.compute_ff_tokens()[:MAX_FORCED]
        if count:
            self._matcher.rollback(count)
        return found

    def _mask(self, row: Int32Array) -> bool:
        """Write llguidance's mask of the next token. Return whether the text may end here."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._num_bytes)
        return self._matcher.is_accepting()

    def _close(self, masks: Int32Array, are_complete: Mapping[int, bool]) -> None:
        """Allow the session's own ends in the rows that are complete, and no end elsewhere."""
        rows = list(are_complete)
        own = masks[rows] & ~self._closed_bits
        own[list(are_complete.values())] |= self._end_bits
        if self._matcher.is_error():
            own[:] = 0
        masks[rows] = own

    def _walk(self, token_ids: Sequence[int], parents: Sequence[int]) -> Iterator[Reached]:
        """Yield for each node what its path is. Where that is OPEN, the matcher is behind the node meanwhile."""
        depths = [0] * len(token_ids)
        paths: list[Reached] = []
        followed: list[int] = []  # the nodes behind which the matcher is
        for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            depths[node] = depths[parent] + 1 if parent >= 0 else 1
            path = Reached.OPEN if parent < 0 else paths[parent]
            if path is Reached.ENDED:
                path = Reached.FORBIDDEN
            elif path is Reached.OPEN and token < 0:
                path = Reached.UNKNOWN
            elif path is Reached.OPEN:
                self._return_to(parent, followed, depths, token_ids, parents)
                path = self._step(token)
                if path is not Reached.FORBIDDEN and token not in self._closed:
                    followed.append(node)
            paths.append(path)
            yield path
        if followed:
            self._matcher.rollback(len(followed))

    def _step(self, token: int) -> Reached:
        """Follow a token if the grammar allows it. A token that ends the text is not followed."""
        if token in self._closed:
            is_end = token in self._ends and self._matcher.is_accepting()
            return Reached.ENDED if is_end else Reached.FORBIDDEN
        if not self._matcher.try_consume_tokens([token]):
            return Reached.FORBIDDEN
        return Reached.ENDED if self._matcher.is_stopped() else Reached.OPEN

    def _return_to(
        self, node: int, followed: list[int], depths: list[int], token_ids: Sequence[int], parents: Sequence[int]
    ) -> None:
        """Bring the matcher behind a node whose path is open."""
        missing = []
        while node >= 0 and (len(followed) < depths[node] or followed[depths[node] - 1] != node):
            missing.append(node)
            node = parents[node]
        keep = depths[node] if node >= 0 else 0
        if len(followed) > keep:
            self._matcher.rollback(len(followed) - keep)
            del followed[keep:]
        for one in reversed(missing):
            self._matcher.try_consume_tokens([token_ids[one]])
            followed.append(one)


def _bits(token_ids: Sequence[int] | frozenset[int], num_bytes: int) -> Int32Array:
    """Return a mask of some tokens, i32[words]."""
    flags = np.zeros(8 * num_bytes, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
