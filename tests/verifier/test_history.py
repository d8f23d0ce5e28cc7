"""What is kept of a session's past is what a count of the whole transcript gives, however the transcript grew."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol.messages import Open
from specq.protocol.params import SamplingParams
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.history import Past
from specq.verifier.sessions.session import Session
from specq.verifier.step.plan import plan

TOKENS = st.integers(0, 30)
PENALISED = SamplingParams(presence_penalty=0.5, repetition_penalty=1.2, bad_token_ids=((1, 2, 3), (4,)))


def fields(history):
    return (
        history.prompt_len,
        history.end_ids,
        *(array.tolist() for array in (history.tail, history.token_ids, history.counts)),
    )


@given(st.lists(TOKENS, min_size=1, max_size=200), st.integers(0, 20), st.sets(st.integers(1, 200)), st.booleans())
def test_counts_are_those_of_the_whole_transcript(tokens, prompt_len, seen_at, with_prompt):
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2 if with_prompt else 1.0)
    prompt_len, past = min(prompt_len, len(tokens)), Past(params, prompt_len)
    for length in sorted(at for at in seen_at if prompt_len <= at <= len(tokens)):
        past.history(tokens[:length])
    history, text = past.history(tokens), tokens[prompt_len:]
    occurring = sorted(set(tokens if with_prompt else text))
    assert history.token_ids.tolist() == occurring
    assert history.counts.tolist() == [text.count(token) for token in occurring]
    assert (history.token_ids.dtype, history.counts.dtype) == (np.int32, np.float32)


def test_a_history_stays_as_it_was_when_the_text_goes_on():
    past = Past(PENALISED, 1)
    first = past.history([5, 6])
    before = fields(first)
    past.history([5, 6, 6, 2])
    assert fields(first) == before


@pytest.mark.parametrize(
    ("asked", "tail"),
    [({"min_tokens": 3}, []), ({"bad_token_ids": ((7,),)}, []), ({"bad_token_ids": ((7,), (1, 2, 3))}, [8, 9])],
)
def test_only_the_last_tokens_are_kept_without_counts(asked, tail):
    history = Past(SamplingParams(**asked), 2, (0,)).history([5, 6, 7, 8, 9])
    assert fields(history) == (2, (0,), tail, [], [])


def test_no_history_is_kept_when_no_parameter_needs_it():
    assert Past(SamplingParams(temperature=0.8, logit_bias=((3, 1.0),)), 2).history([1, 2, 3]) is None


def opened(tokens):
    asked = {"prompt_len": 3, "params": PENALISED, "tokens_left": 50}
    return Session(Open(session_id=1, epoch=1, token_ids=np.array(tokens, np.int32), **asked), (0,))


def test_a_session_that_is_opened_again_or_elsewhere_has_the_same_past():
    running = opened([1, 2, 3])
    for committed in ([4], [4, 2, 9], [1]):
        running.history()
        running.token_ids += committed
    moved = opened(running.token_ids)
    assert fields(running.history()) == fields(moved.history())
    moved.token_ids += [4]
    running.token_ids += [4]
    assert fields(running.history()) == fields(moved.history())


def test_it_is_handed_to_other_processes_as_it_is():
    history = opened([1, 2, 3, 4, 4]).history()
    assert fields(pickle.loads(pickle.dumps(history))) == fields(history)


def test_its_size_does_not_grow_with_the_text_but_with_the_tokens_that_occur():
    short, long = (len(pickle.dumps(opened([1, 2, 3] + [4, 5] * count).history())) for count in (1, 10_000))
    assert long == short


def test_a_prefill_chunk_that_is_not_judged_takes_no_history():
    session = opened([1, 2, 3, 4])
    curve = StepCurve([1, 8], [0.001, 0.001])
    [chunk] = plan([session], curve, max_rows=2, free_slots=100).shares
    assert (chunk.step.judged, chunk.step.history) == (False, None)
    session.kv_len = 2
    [last] = plan([session], curve, max_rows=2, free_slots=100).shares
    assert fields(last.step.history) == fields(session.history())
