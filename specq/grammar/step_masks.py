"""The masks of a step's sessions, computed when the judge asks for them, or begun earlier in other threads.

One call computes the masks of all sessions whose drafts are chains, in several threads and without Python's lock. Trees
are walked one by one.

A grammar whose masks take too long is ended. A step with slow masks makes the grammars *watched*: their next masks are
computed and timed one by one. A grammar that is slow MOST_SLOW times fails its session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from specq.grammar.session_grammar import Ends, SessionGrammar
from specq.protocol import NO_TREE, Int32Array, IntpArray
from specq.runtime import available_cores
from specq.verification import JudgedSteps, MaskedSteps, TokenMasks, ends_of, host_memory

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    Plain = tuple[LLMatcher, int]  # and the row
    Chain = tuple[LLMatcher, int, list[int]]  # and the first row, and the tokens

SLOW_STEP_S = 0.02  # wall time of all masks of a step
SLOW_MASK_S, SLOW_ROW_S = 0.01, 0.0025  # CPU time of one session's first mask, and of each further row
MOST_SLOW = 3
MOST_THREADS = 8
MOST_BUFFERS = 4  # kept: one for each step in flight, and one more
FEW = 16  # fewer masks take longer to hand to threads than to compute, if nothing else is done meanwhile


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
        return host_memory(size)

    def give(self, buffer: Int32Array) -> None:
        """Take memory back that nothing uses any more."""
        self._free.append(buffer)
        if len(self._free) > MOST_BUFFERS:
            self._free.pop(0)


BUFFERS = Buffers()


@dataclass(slots=True)
class MaskRows:
    """The rows of a step's masks, while these are computed.

    - `session_ids`: of all judged steps.
    - `places`, `counts`: i64[n], as of `MaskedSteps`.
    - `words`: i32[rows, words].
    - `are_complete`: of each row, as `SessionGrammar.fill` returns them.
    - `began`: wall clock.
    - `ended`: the wall clock at the end of the call, if another thread makes it.
    """

    session_ids: list[int]
    places: IntpArray
    counts: IntpArray
    words: Int32Array
    grammars: list[SessionGrammar]
    are_complete: list[bool | None]
    began: float
    ended: Future[float] | None = None


@cache
def _caller() -> ThreadPoolExecutor:
    """Return the thread that calls `executor`, so that the verifier's thread goes on."""
    return ThreadPoolExecutor(1, "masks")


class StepMasks(TokenMasks):
    """The masks of sessions with these grammars, by session id, in one step.

    They follow the transcripts as these are at `begin`, or else when the judge asks. That is after the step before has
    been committed, and before this one is.
    """

    def __init__(self, grammars: Mapping[int, SessionGrammar]) -> None:
        self._grammars = grammars
        self._begun: MaskRows | None = None
        self._whole: tuple[list[int], MaskedSteps] | None = None  # of all sessions of the step
        self._reasons: dict[int, str] = {}
        self._buffer: Int32Array | None = None

    def __del__(self) -> None:
        """Give the memory of the masks back, unless another thread may still write them."""
        if self._buffer is not None and self._begun is None:
            BUFFERS.give(self._buffer)

    def begin(self, judged: JudgedSteps) -> None:
        """See `TokenMasks`."""
        if self._begun is None and self._whole is None:
            self._begun = self._rows(judged, is_alone=False)

    def of(self, judged: JudgedSteps) -> MaskedSteps:
        """See `TokenMasks`."""
        if self._whole is None:
            rows, self._begun = self._begun or self._rows(judged, is_alone=True), None
            self._whole = rows.session_ids, self._ended(rows)
        session_ids, found = self._whole
        if session_ids == judged.session_ids:
            return found
        known = {session_ids[place]: words for place, words in found.each()}
        return MaskedSteps.of({i: known[own] for i, own in enumerate(judged.session_ids) if own in known})

    def reason(self, session_id: int) -> str:
        """See `TokenMasks`."""
        return self._reasons.get(session_id, "")

    def _rows(self, judged: JudgedSteps, *, is_alone: bool) -> MaskRows:
        """Begin to compute the masks. `is_alone`: this thread waits for them."""
        places = np.array([i for i, own in enumerate(judged.session_ids) if own in self._grammars], np.intp)
        grammars = [self._grammars[judged.session_ids[i]] for i in places.tolist()]
        counts = judged.num_nodes[places] + 1
        num_rows, num_words = int(counts.sum()), grammars[0].num_words if grammars else 0
        self._buffer = BUFFERS.take(num_rows * num_words)
        words = self._buffer[: num_rows * num_words].reshape(num_rows, num_words)
        if num_rows > len(places):
            words.fill(-1)
        rows = MaskRows(judged.session_ids, places, counts, words, grammars, [], time.perf_counter())
        _fill(judged, rows, is_alone=is_alone)
        return rows

    def _ended(self, rows: MaskRows) -> MaskedSteps:
        """Wait for the masks, and add what ends texts."""
        ended = time.perf_counter() if rows.ended is None else rows.ended.result()
        if ended - rows.began > SLOW_STEP_S:
            for grammar in rows.grammars:
                grammar.is_watched = True
        close([grammar.ends for grammar in rows.grammars], rows.counts, rows.are_complete, rows.words)
        found = MaskedSteps(rows.places, rows.counts, rows.words)
        if any(grammar.has_failed for grammar in rows.grammars):
            for grammar, (place, words) in zip(rows.grammars, found.each(), strict=True):
                if reason := grammar.reason():
                    self._reasons[rows.session_ids[place]] = reason
                    words[:] = 0
        return found


def _fill(judged: JudgedSteps, rows: MaskRows, *, is_alone: bool) -> None:
    """Write the masks of all sessions, without what ends their texts. `is_alone`: wait for them."""
    plain: list[Plain] = []
    chains: list[Chain] = []
    handed: list[SessionGrammar] = []
    ends, are_few = ends_of(rows.counts).tolist(), is_alone and len(rows.words) < FEW
    for place, grammar, first, end in zip(rows.places.tolist(), rows.grammars, [0, *ends], ends, strict=False):
        is_timed, matcher = are_few or grammar.is_watched, grammar.matcher
        if end - first == 1 and not is_timed:
            rows.are_complete.append(matcher.is_accepting())
            plain.append((matcher, first))
            handed.append(grammar)
            continue
        tree = judged[place].tree if end - first > 1 else NO_TREE
        token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
        if is_timed or parents != list(range(-1, len(parents) - 1)):
            rows.are_complete += _timed(grammar, token_ids, parents, rows.words[first:end])
            continue
        rows.are_complete += grammar.fill(token_ids, parents)
        handed.append(grammar)
        if chain := grammar.chain(token_ids):
            chains.append((matcher, first, chain))
        else:
            plain.append((matcher, first))
    if handed:
        rows.ended = _compute(rows.words, plain, chains, is_alone=is_alone)
    if rows.ended is not None:
        for grammar in handed:
            grammar.lend(rows.ended)


def _compute(words: Int32Array, plain: list[Plain], chains: list[Chain], *, is_alone: bool) -> Future[float] | None:
    """Compute the masks of rows, and of chains from their first row on. Return when, if another thread does it."""

    def call() -> None:  # which keeps the memory
        target = words.ctypes.data, words.shape[1] * words.itemsize, len(words)
        if plain:
            executor().unsafe_compute_mask_ptr(plain, *target)
        if chains:
            executor().unsafe_compute_mask_ptr_with_draft_token(chains, *target)

    if is_alone:
        call()
        return None
    return _beside(call)


def _beside(call: Callable[[], None]) -> Future[float]:
    """Let another thread make a call that soon gives up Python's lock; return when it ended.

    This thread waits until the call has the lock. Else the call could wait for it as long as this thread works.
    """
    is_called = Lock()
    is_called.acquire()

    def run() -> float:
        is_called.release()
        call()
        return time.perf_counter()

    ended = _caller().submit(run)
    is_called.acquire()
    return ended


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
        own.put(words, rows, is_complete[rows])
