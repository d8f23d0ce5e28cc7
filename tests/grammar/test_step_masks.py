"""Masks of a step: what a draft adds to them never fails a session that plain decoding would not fail."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np

from specq.grammar import SessionGrammar, StepMasks, step_masks
from specq.grammar.building import build_matcher
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.protocol import SamplingParams, SessionStep, Tree
from specq.protocol.grammars import grammar_text
from specq.testing.tokenizer import tokenizer_files
from specq.verification import StepBatch
from tests.each import each

EOS, SIZE = 0, 352
TOKENIZER = build_tokenizer(tokenizer_files(), SIZE, (EOS,))
BANNING: list[dict[str, Any]] = [
    {"min_tokens": 20},
    {"bad_token_ids": ((EOS,),)},
    {"logit_bias": ((EOS, -100.0),)},
]


def grammar_of(regex: str) -> SessionGrammar:
    matcher = build_matcher(TOKENIZER, grammar_text({"regex": regex}), GrammarLimits())
    return SessionGrammar(matcher, TOKENIZER.inner, (EOS,))


def step_of(text: str, parents: list[int] | None = None, **params: Any) -> StepBatch:
    """Return the step of session 1, whose drafts spell a text, as a chain by default."""
    token_ids = np.array([TOKENIZER.ids(one)[0] for one in text], np.int32)
    tree = Tree(token_ids, np.array(parents or range(-1, len(text) - 1), np.int32), np.zeros(len(text), np.float32))
    given = SamplingParams(max_tokens=50, **params)
    return StepBatch.of([SessionStep(1, 0, np.array([5], np.int32), tree=tree, params=given, judged=True)]).judged()


@each("params", BANNING)
def test_a_row_behind_the_end_allows_more_than_an_end_that_the_job_may_ban(params):
    """Plain decoding ends the text with the last token of the grammar, and has no such row."""
    words = StepMasks({1: grammar_of("abc")}).of(step_of("abc", **params)).words
    allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in words]
    assert max(map(len, allowed[:3])) < 5
    assert len(allowed[3]) > 100


def test_a_large_tree_is_not_a_slow_grammar(monkeypatch):
    """The same milliseconds are slow for one mask, and not for those of sixty rows."""
    clock = iter(np.arange(1000) * 0.013)
    monkeypatch.setattr(step_masks.time, "thread_time", lambda: float(next(clock)))
    for text, is_slow in (("a", True), ("a" * 60, False)):
        grammar = grammar_of("a{100}")
        grammar.is_watched = True
        for _ in range(step_masks.MOST_SLOW + 1):
            StepMasks({1: grammar}).of(step_of(text, [-1] * len(text)))
            grammar.is_watched = True
        assert bool(grammar.reason()) == is_slow


class HeldExecutor:
    """Computes masks once it may. `order`: what happened."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.may_go, self.order = inner, Event(), list[Any]()

    def unsafe_compute_mask_ptr(self, *args: Any) -> None:
        self._call(self._inner.unsafe_compute_mask_ptr, *args)

    def unsafe_compute_mask_ptr_with_draft_token(self, *args: Any) -> None:
        self._call(self._inner.unsafe_compute_mask_ptr_with_draft_token, *args)

    def _call(self, call: Callable[..., None], *args: Any) -> None:
        assert self.may_go.wait(20)
        call(*args)
        self.order.append("masks")


@each("text", ["", "ab"])
def test_masks_that_began_in_another_thread_are_those_of_this_thread(text, monkeypatch):
    """What asks the grammar for something meanwhile waits until they are ready."""
    expected = StepMasks({1: grammar_of("abc")}).of(step_of(text)).words.copy()
    held = HeldExecutor(step_masks.executor())
    monkeypatch.setattr(step_masks, "executor", lambda: held)
    grammar, step = grammar_of("abc"), step_of(text)
    masks = StepMasks({1: grammar})
    masks.begin(step)
    with ThreadPoolExecutor(1) as pool:
        forced = pool.submit(lambda: held.order.append(grammar.forced()))
        held.may_go.set()
        forced.result(20)
    assert held.order == ["masks", grammar_of("abc").forced()]
    assert np.array_equal(masks.of(step).words, expected)


def test_memory_into_which_masks_are_written_is_not_used_again(monkeypatch):
    """Where a step is given up before its masks are ready."""
    held = HeldExecutor(step_masks.executor())
    monkeypatch.setattr(step_masks, "executor", lambda: held)
    monkeypatch.setattr(step_masks, "BUFFERS", step_masks.Buffers())
    grammar = grammar_of("abc")
    masks = StepMasks({1: grammar})
    masks.begin(step_of(""))
    memory = weakref.ref(masks._buffer)
    del masks
    gc.collect()
    assert memory() is not None
    taken = step_masks.BUFFERS.take(1)
    assert taken is not memory()
    held.may_go.set()
    assert grammar.forced()
    assert held.order == ["masks"]


def test_masks_that_began_serve_a_part_of_the_sessions():
    """Sessions that were closed meanwhile are left out."""
    steps = [step_of("ab")[0], step_of("a")[0]]
    whole = StepBatch.of([steps[0], replace(steps[1], session_id=2)]).judged()
    masks = StepMasks({1: grammar_of("abc"), 2: grammar_of("axc")})
    masks.begin(whole)
    part = masks.of(whole.take(np.array([1], np.intp)))
    assert part.places.tolist() == [0]
    assert np.array_equal(part.words, StepMasks({1: grammar_of("axc")}).of(step_of("a")).words)
