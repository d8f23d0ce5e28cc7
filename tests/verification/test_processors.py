"""Penalties, bias, bad tokens, min_tokens and log-probabilities: each node is judged with its own path's counts."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep
from specq.testing.random_steps import VOCAB, packed_logits, trees
from specq.verification import host_kernels
from specq.verification.judge import judge
from specq.verification.packing import place
from specq.verification.processors import shaped
from specq.verifier.sessions.history import Past
from tests.each import each
from tests.verification.steps import tree_of

TOKENS = st.integers(0, VOCAB - 1)
PENALTIES = st.sampled_from([0.0, 0.0, 0.7, -1.5])


@st.composite
def shaping_params(draw):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.8])),
        seed=draw(st.integers(0, 99)),
        min_tokens=draw(st.sampled_from([0, 0, 2, 5])),
        presence_penalty=draw(PENALTIES),
        frequency_penalty=draw(PENALTIES),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4, 0.8])),
        logit_bias=tuple(draw(st.lists(st.tuples(st.integers(0, VOCAB + 3), st.floats(-5, 5)), max_size=3))),
        allowed_token_ids=tuple(draw(st.sampled_from([(), (), (*range(0, VOCAB + 3, 2), 5)]))),
        bad_token_ids=tuple(draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3))),
        logprobs=draw(st.sampled_from([-1, 0, 3])),
    )


class Case(NamedTuple):
    """A step, and the context and prompt's length that its history was made of."""

    step: SessionStep
    context: list[int]
    prompt_len: int


END_IDS = (0, VOCAB + 1)


@st.composite
def cases(draw):
    """Histories are counted at once, or as the context grows by some tokens at a time."""
    context = draw(st.lists(TOKENS, min_size=1, max_size=12))
    prompt_len = draw(st.integers(0, len(context)))
    num_last = draw(st.integers(1, len(context)))
    params = draw(shaping_params())
    past = Past(params, prompt_len, END_IDS)
    for length in sorted(draw(st.sets(st.integers(max(prompt_len, 1), len(context))))):
        past.history(context[:length])
    step = SessionStep(
        session_id=draw(st.integers(0, 9)),
        start=len(context) - num_last,
        token_ids=np.array(context[-num_last:], np.int32),
        params=params,
        tree=draw(trees(max_nodes=6)),
        history=past.history(context),
    )
    return Case(step, context, prompt_len)


def naive(row, params, context, prompt_len):
    """The logits f32[vocab] of the token that follows `context`, one token at a time."""
    row, text = row.copy(), context[prompt_len:]
    if params.allowed_token_ids:
        row[[token for token in range(len(row)) if token not in params.allowed_token_ids]] = -np.inf
    for *first, last in params.bad_token_ids:
        if context[len(context) - len(first) :] == first and len(context) >= len(first):
            row[last] = -np.inf
    if len(text) < params.min_tokens:
        row[[token for token in END_IDS if token < len(row)]] = -np.inf
    for token in range(len(row)):
        row[token] += np.float32(sum(bias for biased, bias in params.logit_bias if biased == token))
        if token in context:
            factor = np.float32(params.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= np.float32(params.frequency_penalty) * np.float32(text.count(token))
        row[token] -= np.float32(params.presence_penalty) * np.float32(token in text)
    return row


def naive_rows(batch, logits):
    """The same of all rows of a batch: each after its step's context and the path to its node."""
    rows = []
    for step, context, prompt_len in batch:
        contexts = [context]
        for token, parent in zip(step.tree.token_ids.tolist(), step.tree.parents.tolist(), strict=True):
            contexts.append([*contexts[parent + 1], token])
        rows += [naive(logits[len(rows) + i], step.params, text, prompt_len) for i, text in enumerate(contexts)]
    return rows


@given(st.lists(cases(), max_size=4), st.integers(0, 2**32))
def test_rows_are_the_naive_ones_of_their_own_paths_to_the_bit(batch, entropy):
    logits = packed_logits([case.step for case in batch], entropy)
    before = logits.clone()
    with shaped(place([case.step for case in batch]), logits) as rows:
        assert all(map(np.array_equal, rows.numpy(), naive_rows(batch, before.numpy())))
    assert torch.equal(before, logits), "they are as they were"


@each("kind", ["bfloat16", "a part of wider rows", "columns first", "rows that are one", "inference"])
def test_logits_of_any_kind_are_shaped_and_left_as_they_were(kind):
    torch.manual_seed(1)
    made = {
        "bfloat16": lambda: torch.randn(2, VOCAB).bfloat16(),
        "a part of wider rows": lambda: torch.randn(3, VOCAB + 5)[1:, 2:-3],
        "columns first": lambda: torch.randn(VOCAB, 2).T,
        "rows that are one": lambda: torch.randn(1, VOCAB).expand(2, VOCAB),
        "inference": torch.inference_mode()(lambda: torch.randn(2, VOCAB)),
    }
    logits = made[kind]()
    params = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, bad_token_ids=((3,), (2, 4)), allowed_token_ids=(1, 2, 3, 9)
    )
    context, history = [1, 2, 2], Past(params, 1).history([1, 2, 2])
    step = SessionStep(1, 2, np.array([2], np.int32), params, tree_of([2]), history=history)
    before = logits.clone()
    expected = naive_rows([Case(step, context, 1)], before.float().numpy())
    with shaped(place([step]), logits) as rows:
        assert np.array_equal(rows.numpy(), expected)
    assert torch.equal(logits, before)


def test_logits_are_restored_where_judging_fails():
    params = SamplingParams(bad_token_ids=((0,), (1,)))
    logits = torch.zeros(1, 2)
    with pytest.raises(EngineError):
        judge([SessionStep(1, 0, np.zeros(1, np.int32), params, history=Past(params, 1).history([0]))], logits)
    assert torch.equal(logits, torch.zeros(1, 2))


@each("library", [True, False])
def test_log_probabilities_are_those_of_the_target_where_penalties_shape_its_logits(library, monkeypatch):
    if not library:
        monkeypatch.setattr(host_kernels, "kernels", lambda: None)
    params = SamplingParams(logprobs=0, presence_penalty=2.0)
    logits = torch.tensor([[0.6, 0.4]]).log()
    step = SessionStep(1, 1, np.zeros(1, np.int32), params, history=Past(params, 0).history([0, 0]))
    [judgement] = judge([step], logits)
    assert judgement.token_ids.tolist() == [1]
    assert np.exp(judgement.logprobs.tokens) == pytest.approx([0.4])


def test_logits_pass_through_without_processors():
    batch = [SessionStep(1, 0, np.zeros(1, np.int32), SamplingParams(temperature=0.8, top_p=0.9, logprobs=3))]
    logits = packed_logits(batch, 0)
    with shaped(place(batch), logits) as rows:
        assert rows is logits


@each("shaping", [{"min_tokens": 1}, {"presence_penalty": 1.0}, {"bad_token_ids": ((1,),)}])
def test_a_missing_history_raises(shaping):
    step = SessionStep(7, 0, np.zeros(1, np.int32), SamplingParams(**shaping))
    with pytest.raises(EngineError, match=r"session 7: .* history"):
        judge([step], torch.zeros(1, 5))


@settings(max_examples=40)
@given(shaping_params(), st.integers(0, 2**32))
def test_speculation_changes_no_penalised_text(params, entropy):
    """Ten tokens with full trees of depth two, and one at a time, from a target that remembers nothing."""
    rng = np.random.default_rng(entropy)
    table = rng.normal(0, 2, (40, VOCAB)).astype(np.float32)
    tokens = [*range(VOCAB), *np.tile(np.arange(VOCAB), VOCAB)]
    bushy = tree_of(tokens, [-1] * VOCAB + np.repeat(np.arange(VOCAB), VOCAB).tolist())
    texts, logprobs = [], []
    for tree in (NO_TREE, bushy):
        context, found = [1, 2, 3], []
        while len(context) < 13:
            history = Past(params, 2, (0,)).history(context)
            step = SessionStep(1, len(context) - 1, np.array(context[-1:], np.int32), params, tree, history=history)
            rows = table[[len(context), *(len(context) + tree.depths())]]
            [judgement] = judge([step], torch.from_numpy(rows))
            context += judgement.token_ids.tolist()
            found += [] if judgement.logprobs is None else judgement.logprobs.tokens.tolist()
        texts.append(context[:13])
        logprobs.append(found[:10])
    assert texts[0] == texts[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-6)
    assert len(logprobs[0]) == (10 if params.logprobs >= 0 else 0)


def test_logprobs_are_of_the_plain_logits():
    params = SamplingParams(logprobs=2, logit_bias=((2, 50.0),), temperature=0.0)
    [judgement] = judge([SessionStep(1, 0, np.zeros(1, np.int32), params)], torch.tensor([[0.5, 0.2, 0.3]]).log())
    assert judgement.token_ids.tolist() == [2]
    assert np.exp(judgement.logprobs.tokens) == pytest.approx([0.3])
    assert judgement.logprobs.top_ids.tolist() == [[0, 2]]
    assert np.exp(judgement.logprobs.top[0]) == pytest.approx([0.5, 0.3])
    assert judge([SessionStep(1, 0, np.zeros(1, np.int32), SamplingParams())], torch.zeros(1, 3))[0].logprobs is None
