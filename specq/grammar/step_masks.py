"""The masks of a step's sessions, computed when the judge asks for them.

One call computes the masks of all sessions whose drafts are chains, in several threads and without Python's lock. Trees
are walked one by one.

A grammar whose masks take too long is ended. A step with slow masks makes the grammars *watched*: their next masks are
computed and timed one by one. A grammar that is slow MOST_SLOW times fails its session.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from specq.grammar.session_grammar import Ends, SessionGrammar
from specq.protocol import NO_TREE, Int32Array, IntpArray
from specq.runtime import available_cores
from specq.verification import MaskedSteps, StepBatch, TokenMasks, ends_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

SLOW_STEP_S = 0.02  # wall time of all masks of a step
SLOW_MASK_S, SLOW_ROW_S = 0.01, 0.0025  # CPU time of one session's first mask, and of each further row
MOST_SLOW = 3
MOST_THREADS = 8
MOST_BUFFERS = 4  # kept: one for each step in flight, and one more
FEW = 16  # fewer masks take longer to hand to threads than to compute


@cache
def executor() -> LLExecutor:
    """Return what computes masks in threads, for this process."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=min(len(available_cores()), MOST_THREADS))


class Buffers:
    """Memory for masks, used again. To map megabytes anew for each step takes longer than to compute the masks."""

    def __init__(self) -> None:
        self._free: list[Int32Array] = []

    def take(self, size: int) -> Int32Array:
        """Return i32[at least size]."""
        for i, one in enumerate(self._free):
            if len(one) >= size:
                return self._free.pop(i)
        return np.empty(size, np.int32)

    def give(self, buffer: Int32Array) -> None:
        """Take memory back that nothing uses any more."""
        self._free.append(buffer)
        if len(self._free) > MOST_BUFFERS:
            self._free.pop(0)


BUFFERS = Buffers()


class StepMasks(TokenMasks):
    """The masks of sessions with these grammars, by session id, in one step.

    They follow the transcripts as these are when the judge asks. That is after the step before has been committed, and
    before this one is.
    """

    def __init__(self, grammars: Mapping[int, SessionGrammar]) -> None:
        self._grammars = grammars
        self._known: dict[int, Int32Array] = {}
        self._whole: tuple[list[int], MaskedSteps] | None = None  # of all sessions of the step
        self._reasons: dict[int, str] = {}
        self._buffer: Int32Array | None = None

    def __del__(self) -> None:
        """Give the memory of the masks back: none of them is used longer than this object."""
        if self._buffer is not None:
            BUFFERS.give(self._buffer)

    def of(self, judged: StepBatch) -> MaskedSteps:
        """See `TokenMasks`."""
        if self._whole is not None and self._whole[0] == judged.session_ids:
            return self._whole[1]
        places = [i for i, own in enumerate(judged.session_ids) if own in self._grammars]
        if self._whole is None:
            found = self._computed(judged, np.array(places, np.intp))
            self._whole = judged.session_ids, found
            return found
        return MaskedSteps.of({i: self._known[judged.session_ids[i]] for i in places})

    def reason(self, session_id: int) -> str:
        """See `TokenMasks`."""
        return self._reasons.get(session_id, "")

    def _computed(self, judged: StepBatch, places: IntpArray) -> MaskedSteps:
        if not len(places):
            return MaskedSteps.of({})
        ids = [judged.session_ids[i] for i in places.tolist()]
        grammars = [self._grammars[one] for one in ids]
        counts = judged.num_nodes[places] + 1
        num_rows, num_words = int(counts.sum()), grammars[0].num_words
        self._buffer = BUFFERS.take(num_rows * num_words)
        words = self._buffer[: num_rows * num_words].reshape(num_rows, num_words)
        if num_rows > len(places):
            words.fill(-1)
        ends = ends_of(counts).tolist()
        spans = list(zip([0, *ends], ends, strict=False))
        started = time.perf_counter()
        are_complete = self._fill(judged, places.tolist(), grammars, spans, words)
        if time.perf_counter() - started > SLOW_STEP_S:
            for grammar in grammars:
                grammar.is_watched = True
        close([grammar.ends for grammar in grammars], counts, are_complete, words)
        for session_id, grammar, (first, end) in zip(ids, grammars, spans, strict=True):
            if reason := grammar.reason():
                self._reasons[session_id] = reason
                words[first:end] = 0
            self._known[session_id] = words[first:end]
        return MaskedSteps(places, counts, words)

    def _fill(
        self,
        judged: StepBatch,
        places: Sequence[int],
        grammars: Sequence[SessionGrammar],
        spans: Sequence[tuple[int, int]],
        words: Int32Array,
    ) -> list[bool | None]:
        """Write the masks of all sessions, without what ends their texts. Return what `SessionGrammar.fill` returns."""
        found: list[bool | None] = []
        plain: list[tuple[LLMatcher, int]] = []
        chains: list[tuple[LLMatcher, int, list[int]]] = []
        for place, grammar, (first, end) in zip(places, grammars, spans, strict=True):
            is_alone = grammar.is_watched or len(words) < FEW
            if end - first == 1 and not is_alone:
                found.append(grammar.is_complete)
                plain.append((grammar.matcher, first))
                continue
            tree = judged[place].tree if end - first > 1 else NO_TREE
            token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
            if is_alone or parents != list(range(-1, len(parents) - 1)):
                found += _timed(grammar, token_ids, parents, words[first:end])
                continue
            found += grammar.fill(token_ids, parents)
            if chain := grammar.chain(token_ids):
                chains.append((grammar.matcher, first, chain))
            else:
                plain.append((grammar.matcher, first))
        target = words.ctypes.data, words.shape[1] * words.itemsize, len(words)
        if plain:
            executor().unsafe_compute_mask_ptr(plain, *target)
        if chains:
            executor().unsafe_compute_mask_ptr_with_draft_token(chains, *target)
        return found


def _timed(
    grammar: SessionGrammar, token_ids: Sequence[int], parents: Sequence[int], words: Int32Array
) -> list[bool | None]:
    """Write the masks of one session, and note whether they took long."""
    started = time.thread_time()
    found = grammar.fill(token_ids, parents, words)
    if time.thread_time() - started > SLOW_MASK_S + SLOW_ROW_S * len(parents):  # drafts must not fail a session
        grammar.num_slow += 1
    else:
        grammar.is_watched = False
    if grammar.num_slow > MOST_SLOW:
        grammar.fail(f"its masks take longer than {SLOW_MASK_S * 1e3:.0f} ms")
    return found


def close(ends: Sequence[Ends], counts: IntpArray, are_complete: Sequence[bool | None], words: Int32Array) -> None:
    """Allow what ends a session's text in the rows that are complete, and no end elsewhere.

    Rows that a grammar does not reach allow everything, so that other parameters leave something too.

    ends, counts  of each session: what ends its text, and the number of its rows.
    are_complete  of each row; None: not reached.
    """
    is_reached = np.array([one is not None for one in are_complete])
    is_complete = np.array([bool(one) for one in are_complete])
    words[~is_reached] = -1
    kinds = np.array([id(own) for own in ends]).repeat(counts)
    for own in {id(own): own for own in ends}.values():
        rows = ((kinds == id(own)) & is_reached).nonzero()[0]
        for word, closed, opened in own.words:
            words[rows, word] = (words[rows, word] & ~closed) | np.where(is_complete[rows], opened, 0).astype(np.int32)
