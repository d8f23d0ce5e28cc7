"""The grammar of one session: it follows the committed tokens, and says what may come next.

Rule: only `commit` advances it. Everything else looks ahead and returns to the same state. So a mask never depends on a
draft that was not accepted.

A token that ends the text (end-of-sequence unless ignored, and the job's stop tokens) may come where the grammar is
complete, and nowhere else. Where a grammar is complete and cannot go on, the text ends without such a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specq.grammar.mask_rows import MaskRows
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


class Ends(NamedTuple):
    """The tokens that end a text, as words of masks.

    - `words`: each word that has one of these tokens; the bits of all of them, and of the session's own.
    """

    words: tuple[tuple[int, np.int32, np.int32], ...]

    @staticmethod
    def of(tokenizer: LLTokenizer, end_ids: Iterable[int]) -> Ends:
        """Return the ends of a session with these tokens."""
        return _ends_of(tuple(tokenizer.eos_tokens), tuple(end_ids))

    def put(self, masks: Int32Array, are_complete: Sequence[bool | None]) -> None:
        """Allow the session's own ends in the rows of masks i32[n, words] that are complete, and no end elsewhere."""
        complete = [row for row, is_complete in enumerate(are_complete) if is_complete]
        for word, closed, opened in self.words:
            masks[:, word] &= ~closed
            if complete:
                masks[complete, word] |= opened


@lru_cache(maxsize=256)  # sessions with equal ends have the same object
def _ends_of(eos_tokens: tuple[int, ...], end_ids: tuple[int, ...]) -> Ends:
    own, all_of_them = _bits(end_ids), _bits([*eos_tokens, *end_ids])
    return Ends(tuple((word, bits, own.get(word, np.int32(0))) for word, bits in all_of_them.items()))


def _bits(token_ids: Iterable[int]) -> dict[int, np.int32]:
    """Return the bits of tokens by the word of a mask."""
    found: dict[int, int] = {}
    for token in token_ids:
        found[token >> 5] = found.get(token >> 5, 0) | 1 << (token & 31)
    return {word: np.uint32(bits).astype(np.int32) for word, bits in found.items()}


class SessionGrammar:
    """What a session's grammar allows behind its transcript.

    - `has_ended`: the grammar is complete and allows no further token.
    - `ends`: the tokens that end the text.
    - `ahead`, `row`: masks that other threads compute, and the row among them that comes behind the transcript.
    - `failure`: why nothing is allowed any more, or "".
    - `is_watched`, `num_slow`: whether its masks are timed, and how many were slow.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end_ids: Sequence[int]) -> None:
        """Take a matcher at its start, and the tokens that end this session's text."""
        self._matcher = matcher
        self.ahead: MaskRows | None = None
        self.row, self._is_lent = 0, False
        self._forced: list[int] | None = None  # behind the transcript, if that is known
        self.num_words = (tokenizer.vocab_size + 31) // 32  # of 32 bits, in a mask
        self._ends = frozenset(end for end in end_ids if end < tokenizer.vocab_size)
        self._closed = self._ends.union(tokenizer.eos_tokens)  # the grammar itself may not have them as text
        self.ends = Ends.of(tokenizer, sorted(self._ends))
        self.has_ended = self.is_watched = False
        self.num_slow = 0
        self.failure = ""

    @property
    def matcher(self) -> LLMatcher:
        """The matcher. Waits while another thread has it."""
        if self._is_lent:
            assert self.ahead is not None
            if not self.ahead.wait():
                self.ahead = None
            self._is_lent = False
        return self._matcher

    def lend(self, rows: MaskRows, row: int) -> None:
        """Let other threads have the matcher, which compute a row of these masks."""
        self.ahead, self.row, self._is_lent = rows, row, True

    def is_end(self, token: int) -> bool:
        """Return whether a token ends the text."""
        return token in self._ends

    def commit(self, token_ids: list[int]) -> int:
        """Follow tokens of the transcript; return how many of them belong to the text.

        The rest lies behind the end. Raises EngineError if the grammar does not allow a token.
        """
        matcher, self.ahead, self._forced = self.matcher, None, None
        is_end = bool(token_ids) and token_ids[-1] in self._ends
        inner = [*token_ids[:-1]] if is_end else token_ids
        count = matcher.try_consume_tokens(inner) if inner else 0
        self.has_ended = matcher.is_stopped() and not matcher.is_error()
        if count == len(inner):
            return count if self.has_ended and count else count + is_end
        if self.has_ended and count:
            return count
        raise EngineError(self.reason() or f"the grammar does not allow token {token_ids[count]}, which was committed")

    def note_commit(self, token: int, *, is_allowed: bool) -> None:
        """Note that the matcher has consumed a token of the transcript. Raises as `commit` does."""
        self.ahead = self._forced = None
        if not is_allowed:
            reason = str(self.matcher.get_error()).splitlines()[0][:300]
            raise EngineError(f"the grammar does not allow token {token}, which was committed: {reason}")
        self.has_ended = self._matcher.is_stopped() and not self._matcher.is_error()

    def reason(self) -> str:
        """Return why the grammar cannot be followed further, or ""."""
        if not self.matcher.is_error():
            return self.failure
        return f"the grammar is too complex here: {str(self.matcher.get_error()).splitlines()[0][:300]}"

    def fail(self, reason: str) -> None:
        """Allow nothing from now on."""
        self.failure = f"the grammar is too complex here: {reason}"

    def chain(self, token_ids: list[int]) -> list[int]:
        """Return the part of a chain's tokens before the first that ends a text."""
        return next((token_ids[:i] for i, token in enumerate(token_ids) if token in self._closed), token_ids)

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int]) -> BoolArray:
        """Return for each node of a tree whether its path is allowed, bool[nodes].

        A negative token is not known yet, and counts as allowed with all that follows it. Masks allow forced tokens in
        their usual spelling alone, so other spellings of what is forced behind the transcript are not allowed.
        """
        forced, on_chain = self.forced(), {-1: 0}  # how many forced tokens a node has behind it
        found = [path is not Reached.FORBIDDEN for path in self._walk(token_ids, parents)]
        for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            depth = on_chain.get(parent, len(forced))
            if depth < len(forced) and token >= 0:
                if token == forced[depth]:
                    on_chain[node] = depth + 1
                else:
                    found[node] = False
            elif parent >= 0 and not found[parent]:
                found[node] = False
        return np.array(found, np.bool_)

    def fill(
        self, token_ids: Sequence[int], parents: Sequence[int], masks: Int32Array | None = None
    ) -> list[bool | None]:
        """Return for each row of a tree whether the text may end there; None if the grammar does not reach it.

        The first row comes before the tree, the others follow its nodes. masks i32[1 + nodes, words] receives
        llguidance's mask of each row that is reached.
        """
        found: list[bool | None] = [self._first_row(masks)]
        for row, path in enumerate(self._walk(token_ids, parents), 1):
            found.append(self._row(masks, row) if path is Reached.OPEN else None)
        return found

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self.matcher.is_accepting())

    def _first_row(self, masks: Int32Array | None) -> bool:
        """Write the mask behind the transcript as `_row` does. It may have been computed ahead."""
        is_complete = self.is_complete
        if masks is None or self.ahead is None:
            return self._row(masks, 0)
        masks[0] = self.ahead.words[self.row]
        return is_complete

    def _row(self, masks: Int32Array | None, row: int) -> bool:
        if masks is not None:
            self.matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
        return self.is_complete

    def forced(self, token_ids: Sequence[int] = ()) -> list[int]:
        """Return the only tokens that the grammar allows behind a path, at most MAX_FORCED; [] if the path is not."""
        if not token_ids and self._forced is not None:
            return self._forced
        count = self.matcher.try_consume_tokens(list(token_ids)) if token_ids else 0
        found: list[int] = []
        if count == len(token_ids) and not self.matcher.is_stopped():
            found = self.matcher.compute_ff_tokens()[:MAX_FORCED]
        if count:
            self.matcher.rollback(count)
        if not token_ids:
            self._forced = found
        return found

    def mask_behind(self, path: Sequence[int]) -> Int32Array | None:
        """Return the mask i32[words] behind drafted tokens. None: the text ends before, or may not have them.

        For drafters. It allows what ends the text where the grammar is complete.
        """
        matcher, masks = self.matcher, np.empty((1, self.num_words), np.int32)
        count = matcher.try_consume_tokens([*path]) if path else 0
        is_open = count == len(path) and not matcher.is_stopped()
        is_complete = is_open and (self._row(masks, 0) if path else self._first_row(masks))
        if count:
            matcher.rollback(count)
        if not is_open:
            return None
        self.ends.put(masks, [is_complete])
        words: Int32Array = masks[0]
        return words

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
            self.matcher.rollback(len(followed))

    def _step(self, token: int) -> Reached:
        """Follow a token if the grammar allows it. A token that ends the text is not followed."""
        if token in self._closed:
            is_end = token in self._ends and self.matcher.is_accepting()
            return Reached.ENDED if is_end else Reached.FORBIDDEN
        if not self.matcher.try_consume_tokens([token]):
            return Reached.FORBIDDEN
        return Reached.ENDED if self.matcher.is_stopped() else Reached.OPEN

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
            self.matcher.rollback(len(followed) - keep)
            del followed[keep:]
        for one in reversed(missing):
            self.matcher.try_consume_tokens([token_ids[one]])
            followed.append(one)
