"""Masks of a step: what a draft adds to them never fails a session that plain decoding would not fail."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest

from specq.grammar import SessionGrammar, StepMasks, begin_masks, commit_each, commits, mask_rows, step_masks
from specq.grammar.building import build_matcher
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.protocol import EngineError, SamplingParams, SessionStep, Tree
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
        assert self.may_go.wait(60)
        call(*args)
        self.order.append("masks")


@each("text", ["", "ab"])
def test_masks_that_began_in_another_thread_are_those_of_this_thread(text, monkeypatch):
    """What asks the grammar for something meanwhile waits until they are ready."""
    expected = StepMasks({1: grammar_of("abc")}).of(step_of(text)).words.copy()
    held = HeldExecutor(mask_rows.executor())
    monkeypatch.setattr(mask_rows, "executor", lambda: held)
    grammar, step = grammar_of("abc"), step_of(text)
    begin_masks([grammar])
    with ThreadPoolExecutor(1) as pool:
        forced = pool.submit(lambda: held.order.append(grammar.forced()))
        held.may_go.set()
        forced.result(60)
    assert held.order == ["masks", grammar_of("abc").forced()]
    assert np.array_equal(StepMasks({1: grammar}).of(step).words, expected)
    assert held.order == ["masks", grammar_of("abc").forced()]  # the row behind the text was not computed again


def test_memory_into_which_masks_are_written_is_not_used_again(monkeypatch):
    """Where nothing asks for the masks any more before they are ready."""
    held = HeldExecutor(mask_rows.executor())
    monkeypatch.setattr(mask_rows, "executor", lambda: held)
    monkeypatch.setattr(mask_rows, "BUFFERS", mask_rows.Buffers())
    grammar = grammar_of("abc")
    begin_masks([grammar])
    memory, is_done = weakref.ref(grammar.ahead._buffer), grammar.ahead._beside.wait
    del grammar
    gc.collect()
    assert memory() is not None
    taken = mask_rows.BUFFERS.take(1)
    assert taken is not memory()
    held.may_go.set()
    is_done()
    assert held.order == ["masks"]


def test_masks_that_began_serve_a_part_of_the_sessions_in_any_order():
    """Some sessions are not in the step, or have drafts, or their masks have not begun."""
    texts, expected = {1: "ab", 2: "", 3: "", 4: "a"}, {}
    names = {1: "abc", 2: "axc", 3: "x[yz]", 4: "a[bc]d"}
    steps = {own: replace(step_of(text)[0], session_id=own) for own, text in texts.items()}
    for own, name in names.items():
        expected[own] = StepMasks({own: grammar_of(name)}).of(StepBatch.of([steps[own]]).judged()).words.copy()
    for order in ([3, 2], [2, 3], [2], [4, 1, 3], [1, 2, 3, 4]):
        grammars = {own: grammar_of(names[own]) for own in names}
        begin_masks([grammars[own] for own in (2, 3, 1)])
        found = StepMasks(grammars).of(StepBatch.of([steps[own] for own in order]).judged())
        for own, (_, words) in zip(order, found.each(), strict=True):
            assert np.array_equal(words, expected[own]), (order, own)


def test_masks_that_began_before_a_commit_are_not_used_behind_it():
    grammar, other = grammar_of("abc"), grammar_of("abc")
    begin_masks([grammar])
    for one in (grammar, other):
        assert one.commit(TOKENIZER.ids("a")[:1]) == 1
    assert np.array_equal(*(StepMasks({1: one}).of(step_of("")).words for one in (grammar, other)))


def test_masks_that_cannot_be_computed_beside_are_computed_here(monkeypatch):
    expected = StepMasks({1: grammar_of("abc")}).of(step_of("")).words.copy()
    monkeypatch.setattr(mask_rows, "executor", lambda: None)  # which raises in the thread
    grammar = grammar_of("abc")
    begin_masks([grammar])
    assert np.array_equal(StepMasks({1: grammar}).of(step_of("")).words, expected)


def test_masks_whose_thread_is_busy_are_computed_by_the_one_that_needs_them(monkeypatch):
    """They did not wait for that thread to begin. It does not compute them again."""
    expected = StepMasks({1: grammar_of("abc")}).of(step_of("")).words.copy()
    is_busy, may_end = threading.Event(), threading.Event()

    def work():
        is_busy.set()
        assert may_end.wait(60)

    busy = mask_rows._Call(work)
    busy.begin(waits=True)
    assert is_busy.wait(60)
    called = list[str]()
    compute = mask_rows._compute
    monkeypatch.setattr(
        mask_rows, "_compute", lambda *of: (called.append(threading.current_thread().name), compute(*of))
    )
    grammar = grammar_of("abc")
    begin_masks([grammar], waits=False)
    assert np.array_equal(StepMasks({1: grammar}).of(step_of("")).words, expected)
    may_end.set()
    last = mask_rows._Call(lambda: None)
    last.begin(waits=True)
    last.wait()
    assert called == [threading.current_thread().name]


def test_masks_that_take_long_beside_make_their_grammars_watched(monkeypatch):
    """Such masks are then computed and timed one by one, until one is fast."""
    monkeypatch.setattr(mask_rows, "SLOW_CALL_S", -1.0)
    grammar = grammar_of("a{100}")
    begin_masks([grammar])
    StepMasks({1: grammar}).of(step_of(""))
    assert grammar.is_watched
    grammar.commit(TOKENIZER.ids("a")[:1])
    begin_masks([grammar])
    assert grammar.ahead is None
    monkeypatch.setattr(mask_rows, "SLOW_CALL_S", 1e9)
    StepMasks({1: grammar}).of(step_of(""))
    assert not grammar.is_watched


@pytest.mark.parametrize("threads", [1, 2], ids=["one by one", "at once"])
def test_many_grammars_follow_their_tokens(threads, monkeypatch):
    """Each as alone: single tokens, several, those that end the text, and forbidden ones."""
    monkeypatch.setattr(commits, "num_threads", lambda: threads)
    texts = [TOKENIZER.ids(text) for text in ("a", "b", "ab", "", "ax")] + [[EOS]]
    some = [(regex, text) for regex in ("a", "ab?c*", "[ab]x?") for text in texts] * 3
    grammars = [grammar_of(regex) for regex, _ in some]
    found = commit_each(grammars, [text for _, text in some])
    for (regex, text), own, grammar in zip(some, found, grammars, strict=True):
        alone = grammar_of(regex)
        if isinstance(own, int):
            expected = alone.commit(text)
            assert (own, grammar.has_ended, grammar.forced()) == (expected, alone.has_ended, alone.forced())
        else:
            with pytest.raises(EngineError) as refused:
                alone.commit(text)
            assert f"{own}".startswith(f"{refused.value}")
    assert sum(isinstance(own, int) for own in found) == 42


def test_what_is_forced_may_have_its_usual_spelling_alone():
    """As masks have it. Other spellings would be rows in vain."""
    grammar, ids = grammar_of("hello[xy]"), TOKENIZER.ids("hello")
    letters = [token for letter in "hello" for token in TOKENIZER.ids(letter)]
    assert grammar.forced() == ids != letters
    chain = range(-1, 4)
    assert grammar.allowed(letters, chain).tolist() == [True, *[False] * 4]
    assert grammar.allowed([*ids, TOKENIZER.ids("x")[0], TOKENIZER.ids("z")[0]], [-1, 0, 1, 2, 2]).tolist() == [
        *[True] * 4,
        False,
    ]
    (row,) = StepMasks({1: grammar}).of(step_of("")).words
    assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() == ids[:1]
