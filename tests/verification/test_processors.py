"""Penalties, bias, bad tokens, min_tokens and log-probabilities: each node is judged with its own path's counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.errors import EngineError
from specq.params import SamplingParams
from specq.types import NO_TREE, History, SessionStep
from specq.verification.judge import judge
from specq.verification.packing import place
from specq.verification.processors import process
from tests.verification.strategies import VOCAB, packed_logits, trees

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
        bad_token_ids=tuple(draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3))),
        logprobs=draw(st.sampled_from([-1, 0, 3])),
    )


@st.composite
def shaped_steps(draw):
    context = draw(st.lists(TOKENS, min_size=1, max_size=12))
    num_last = draw(st.integers(1, len(context)))
    return SessionStep(
        session_id=draw(st.integers(0, 9)),
        start=len(context) - num_last,
        token_ids=np.array(context[-num_last:], np.int32),
        params=draw(shaping_params()),
        tree=draw(trees(max_nodes=6)),
        history=History(np.array(context, np.int32), draw(st.integers(0, len(context))), (0, VOCAB + 1)),
    )


def naive(row, params, context, prompt_len, end_ids):
    """The logits f32[vocab] of the token that follows `context`, one token at a time."""
    row, text = row.copy(), context[prompt_len:]
    for *first, last in params.bad_token_ids:
        if context[len(context) - len(first) :] == first and len(context) >= len(first):
            row[last] = -np.inf
    if len(text) < params.min_tokens:
        row[[token for token in end_ids if token < len(row)]] = -np.inf
    for token, bias in params.logit_bias:
        if token < len(row):
            row[token] += np.float32(bias)
    for token in range(len(row)):
        if token in context:
            factor = np.float32(params.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= np.float32(params.frequency_penalty) * np.float32(text.count(token))
        row[token] -= np.float32(params.presence_penalty) * np.float32(token in text)
    return row


@given(st.lists(shaped_steps(), max_size=4), st.integers(0, 2**32))
def test_rows_are_the_naive_ones_of_their_own_paths(batch, entropy):
    logits = packed_logits(batch, entropy)
    before, shaped = logits.clone(), process(place(batch), logits)
    row = 0
    for step in batch:
        contexts = [step.history.token_ids.tolist()]
        for token, parent in zip(step.tree.token_ids.tolist(), step.tree.parents.tolist(), strict=True):
            contexts.append([*contexts[parent + 1], token])
        for context in contexts:
            expected = naive(before[row].numpy(), step.params, context, step.history.prompt_len, step.history.end_ids)
            assert shaped[row].numpy() == pytest.approx(expected, rel=1e-5, abs=1e-5)
            row += 1
    assert torch.equal(before, logits)


def test_logits_are_passed_through_where_nothing_shapes_them():
    batch = [SessionStep(1, 0, np.zeros(1, np.int32), SamplingParams(temperature=0.8, top_p=0.9, logprobs=3))]
    logits = packed_logits(batch, 0)
    assert process(place(batch), logits) is logits


@pytest.mark.parametrize("shaping", [{"min_tokens": 1}, {"presence_penalty": 1.0}, {"bad_token_ids": ((1,),)}])
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
    tokens = np.array([*range(VOCAB), *np.tile(np.arange(VOCAB), VOCAB)], np.int32)
    parents = np.array([-1] * VOCAB + np.repeat(np.arange(VOCAB), VOCAB).tolist(), np.int32)
    bushy = replace(NO_TREE, token_ids=tokens, parents=parents, scores=np.zeros(len(tokens), "f4"))
    texts, logprobs = [], []
    for tree in (NO_TREE, bushy):
        context, found = [1, 2, 3], []
        while len(context) < 13:
            history = History(np.array(context, np.int32), 2, (0,))
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
