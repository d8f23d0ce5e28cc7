"""A draft worker drafts what its sessions' grammars allow, and without where it cannot."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specq.config.sections import DraftConfig
from specq.drafting.draft_model.drafter import DraftModel
from specq.drafting.interface import CONTEXT, Expansion
from specq.drafting.worker import DraftWorker
from specq.grammar import DraftMasks, GrammarBuilder, draft_masks
from specq.grammar.limits import GrammarLimits
from specq.models import resolve_model
from specq.processes.draft import build_worker
from specq.protocol import CAPABILITIES, GRAMMAR_CAPABILITIES, Assign, Draft, Release, SamplingParams, Verdict
from specq.testing.toy_drafters import ToyProposer
from specq.text import TextCodec, load_tokenizer_files
from specq.verification.drafting import truncated_distributions
from tests.each import each
from tests.grammar.hostile import HOSTILE
from tests.grammar.naive import session_grammar, small, tiny

FILES = load_tokenizer_files(resolve_model("tiny", "target"))
CODEC = TextCodec(FILES)
NUMBERS = json.dumps({"regex": "[0-9]{1,40}"})
DRAWN = {"strategy": "probabilistic", "temperature": 1.0}
PATIENCE_S = 60


class Worker:
    """A worker with `tiny` and a builder of grammars, and one session."""

    def __init__(self) -> None:
        self.model = DraftModel(resolve_model("tiny", "draft"), device="cpu", kv_slots=2048)
        info = self.model.info
        self.builder = GrammarBuilder(FILES, info.vocab_size, info.eos_ids, GrammarLimits(trial_s=PATIENCE_S))
        self._built: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.builder.on_ready = lambda: self._built.put(None)
        self.inner = DraftWorker(self.model, incarnation=1, grammar_builder=self.builder)
        self.epoch = 0

    def assign(self, grammar: str = NUMBERS, *, generated: str = "", **params: Any) -> None:
        """Assign the session, with tokens that were generated before. It has drafted nothing yet."""
        prompt = CODEC.encode("The number is ")
        self.epoch += 1
        self.inner.handle(Assign(
            session_id=7, epoch=self.epoch, lane=0, prompt_len=len(prompt),
            params=SamplingParams(max_tokens=100, grammar=grammar, **params),
            token_ids=np.array([*prompt, *CODEC.encode(generated)], np.int32),
        ))  # fmt: skip

    def wait(self) -> None:
        """Wait until a grammar is built or refused."""
        self._built.get(timeout=PATIENCE_S)

    def drafts(self, passes: int = 4) -> list[Draft]:
        return [draft for _ in range(passes) for draft in self.inner.step()]

    def texts(self, passes: int = 4) -> set[str]:
        """Return the text of each drafted token."""
        return {CODEC.decode([token]) for draft in self.drafts(passes) for token in draft.token_ids.tolist()}

    def commit(self, text: str) -> None:
        session = self.inner.sessions[7]
        self.inner.handle(Verdict(
            session_id=7, epoch=self.epoch, base_len=session.length, token_ids=np.array(CODEC.encode(text), np.int32)
        ))  # fmt: skip


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.builder.close()


def are_digits(texts: set[str]) -> bool:
    return bool(texts) and all(re.fullmatch("[0-9]+", text) for text in texts)


# --- what is drafted --------------------------------------------------------------------------------------------------


@each("params", [{}, {"temperature": 0.8}, DRAWN])
def test_nodes_are_what_the_grammar_allows(worker: Worker, params: dict[str, Any]) -> None:
    """Before it is built, and without a grammar, they are not."""
    worker.assign("", **params)
    assert not are_digits(worker.texts())
    worker.assign(**params)
    worker.wait()
    assert are_digits(worker.texts())


def test_it_follows_what_was_generated_before_and_what_is_committed(worker: Worker) -> None:
    worker.assign(json.dumps({"regex": "ab(cd|xy)[0-9]{20}"}), generated="ab")
    worker.wait()
    assert worker.texts() & {"c", "x", "cd", "xy"}
    worker.commit("xy")
    assert are_digits(worker.texts())
    worker.commit("12")
    assert are_digits(worker.texts())


def test_it_drafts_without_until_the_grammar_is_built(worker: Worker) -> None:
    worker.assign()
    worker.inner.grammars._builder = None  # which is never asked
    assert not are_digits(worker.texts())


@each("grammar", ['{"regex":"("}', json.dumps(HOSTILE["masks slowly"][0])])
def test_a_refused_grammar_is_drafted_without(worker: Worker, grammar: str) -> None:
    worker.assign(grammar)
    worker.wait()
    assert worker.drafts()
    assert worker.inner.grammars.masks == {}


def test_a_text_that_leaves_the_grammar_is_drafted_without(worker: Worker) -> None:
    worker.assign()
    worker.wait()
    assert are_digits(worker.texts())
    worker.commit(" is it")
    assert not are_digits(worker.texts())


def test_a_session_that_ends_or_comes_again_leaves_no_grammar(worker: Worker) -> None:
    """Also one whose grammar is being built."""
    worker.assign()
    worker.wait()
    worker.drafts(1)
    assert [*worker.inner.grammars.masks] == [7]
    worker.assign("")
    assert worker.inner.grammars.masks == {}
    assert not are_digits(worker.texts())
    worker.assign()
    worker.inner.handle(Release(session_id=7, epoch=worker.epoch))
    assert (worker.inner.grammars.masks, worker.inner.grammars._waiting) == ({}, {})
    assert worker.builder._waiting == {}


# --- the law that is sent ---------------------------------------------------------------------------------------------


def test_drawn_children_come_with_the_masked_law(worker: Worker) -> None:
    """Its weights are those of the masked logits, for the context and for a node."""
    params, model = SamplingParams(**DRAWN), worker.model
    model.open(1, np.array(CODEC.encode("It costs "), np.int32), params)
    (free,) = model.expand([Expansion(1, CONTEXT, (0, 1, 2))])
    digits = np.array([re.fullmatch("[0-9]+", CODEC.decode([i])) is not None for i in range(model.limit_vocab)])
    asked = list[list[int]]()

    def mask(path: list[int]) -> np.ndarray:
        asked.append([*path])
        bits = np.zeros(-(-model.info.vocab_size // 32) * 32, np.bool_)
        bits[: len(digits)] = digits
        return np.packbits(bits, bitorder="little").view(np.int32)

    model.masks = {1: mask}
    (own,) = model.expand([Expansion(1, CONTEXT, (10, 11, 12))])
    (below,) = model.expand([Expansion(1, 11, (20, 21))])
    assert asked == [[], [own.token_ids[1]]]
    assert None not in (free.distribution, own.distribution, below.distribution)
    assert not digits[free.distribution.ids].all()
    for children in (own, below):
        ids = children.distribution.ids[children.distribution.weights > 0]
        assert digits[ids].all()
        assert set(children.token_ids.tolist()) <= set(ids.tolist())
    logits = model._contexts.compute(model._pool.places([1]))
    logits[:, : len(digits)][:, ~digits] = -np.inf
    ids, weights = truncated_distributions(logits[:, : model.limit_vocab], [params], model.maker.distribution_size)
    assert np.array_equal(own.distribution.ids, ids[0])
    assert np.array_equal(own.distribution.weights, weights[0])


def test_where_nothing_is_allowed_only_drawn_children_come(worker: Worker) -> None:
    """Else the verifier would not see that a node with drawn siblings was expanded (decision 0008)."""
    model = worker.model
    for session_id, params in {1: SamplingParams(), 2: SamplingParams(**DRAWN), 3: SamplingParams()}.items():
        model.open(session_id, np.array(CODEC.encode("It costs "), np.int32), params)
    model.masks = {1: lambda _: None, 2: lambda _: None}
    found = model.expand([Expansion(i, CONTEXT, (0, 1)) for i in (1, 2, 3)])
    assert [len(children.token_ids) for children in found] == [0, 2, 2]


# --- grammars that cost too much --------------------------------------------------------------------------------------


class PanicError(BaseException):
    """As what llguidance raises if it panics, it is no Exception."""


class Panics:
    """A grammar whose every question raises."""

    num_words = 3

    def mask_behind(self, path: object) -> None:
        raise PanicError

    commit = mask_behind


def test_a_grammar_that_raises_ends() -> None:
    for ask in (lambda masks: masks([]), lambda masks: masks.commit([1])):
        masks = DraftMasks(Panics())  # type: ignore[arg-type]
        ask(masks)
        assert masks.has_ended
        assert masks([]).tolist() == [-1, -1, -1]


def test_a_grammar_with_slow_masks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After several, since one may be slow by chance. Then everything is allowed."""
    masks = DraftMasks(session_grammar(tiny(), {"regex": "[0-9]*"}))
    usual = masks([])
    monkeypatch.setattr(draft_masks, "SLOW_MASK_S", -1.0)
    for _ in range(draft_masks.MOST_SLOW):
        assert np.array_equal(masks([]), usual)
    masks([])
    assert masks.has_ended
    assert (masks([]) == -1).all()


def test_a_grammar_that_runs_into_its_limits_ends() -> None:
    """Its masks then allow nothing, and the session would not be drafted for."""
    limits = replace(GrammarLimits(), lexer_states=20)
    masks = DraftMasks(session_grammar(small(), {"regex": "(a|b)*c(a|b){12}d"}, limits=limits))
    text = small().ids("abacabab")
    found = [masks(text[:end]) for end in range(len(text) + 1)]
    assert all(words is not None and words.any() for words in found)
    assert (found[-1] == -1).all()
    assert masks.has_ended


# --- what a worker says of itself -------------------------------------------------------------------------------------


def test_only_a_worker_that_masks_says_so(worker: Worker) -> None:
    assert worker.inner.hello("d").capabilities == (*CAPABILITIES, *GRAMMAR_CAPABILITIES)
    assert DraftWorker(ToyProposer(), incarnation=1).hello("d").capabilities == CAPABILITIES


@each("proposer", ["draft-model", "ngram"])
def test_a_started_worker_masks_with_a_draft_model(proposer: str) -> None:
    worker = build_worker(DraftConfig(model="tiny", proposer=proposer, device="cpu", kv_slots=4096))
    try:
        assert set(GRAMMAR_CAPABILITIES) <= set(worker.hello("d").capabilities) or proposer == "ngram"
        assert worker.grammars.are_followed == (proposer == "draft-model")
    finally:
        worker.grammars.close()


def test_a_draft_model_with_its_targets_tokenizer_masks_with_that_models_ends() -> None:
    """The bundled draft model of `smollm2` has no tokenizer of its own, so it names no end tokens."""
    worker = build_worker(DraftConfig(model="smollm2", device="cpu", kv_slots=4096))
    try:
        assert worker.drafter.info.eos_ids == ()
        assert worker.grammars.are_followed
        assert set(GRAMMAR_CAPABILITIES) <= set(worker.hello("d").capabilities)
    finally:
        worker.grammars.close()


def test_without_llguidance_it_drafts_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarBuilder, "prepare", lambda self: "llguidance is not installed")
    worker = build_worker(DraftConfig(model="tiny", device="cpu", kv_slots=4096))
    assert worker.hello("d").capabilities == CAPABILITIES
