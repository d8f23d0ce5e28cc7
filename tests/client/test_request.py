"""What is refused at the edge, and what a request becomes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from specq.client.request import Served, build_request, sampling_params
from specq.errors import JobError
from tests.fake_broker import CODEC, INFO

SERVED = Served(INFO, CODEC)
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "token_ids": [1]}, "prompt and token_ids"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "string"),
        ({"prompt": "\ud800"}, "Unicode"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "Unicode"),
        ({"messages": "hi"}, "list"),
        ({"token_ids": []}, "empty"),
        ({"token_ids": [1, True]}, "integers"),
        ({"token_ids": [1.0]}, "integers"),
        ({"token_ids": "12"}, "integers"),
        ({"token_ids": [3, INFO.num_tokens]}, f"{INFO.num_tokens} is outside"),
        ({"token_ids": [-1]}, "-1 is outside"),
        ({"token_ids": [2**40]}, "outside"),
        ({"token_ids": [3] * 100}, "100 tokens"),
    ],
)
def test_bad_prompts(source, reason):
    """Each unusable prompt is refused with what is wrong with it."""
    with pytest.raises(JobError, match=reason) as caught:
        build_request(source, {}, SERVED)
    assert caught.value.code == "invalid"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"strategy": "wishful"}, "deterministic"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
def test_bad_params(params, reason):
    """Each bad parameter is named, and so is what is allowed."""
    with pytest.raises(JobError, match=reason) as caught:
        build_request({"prompt": "a"}, params, SERVED)
    assert caught.value.code == "invalid"


def test_sources_become_ids():
    """Text is encoded, a chat goes through the template, ids are taken as they are."""
    text = build_request({"prompt": "two eggs"}, {}, SERVED)
    chat = build_request({"messages": CHAT}, {}, SERVED)
    raw = build_request({"token_ids": np.array([1, 40, 50])}, {}, SERVED)
    assert (text.prompt, text.submit.prompt_ids.tolist()) == ("two eggs", CODEC.encode("two eggs"))
    assert (chat.prompt, chat.submit.prompt_ids.tolist()) == (CODEC.render_chat(CHAT), CODEC.encode_chat(CHAT))
    assert (raw.prompt, raw.submit.prompt_ids.tolist()) == (CODEC.decode([1, 40, 50], skip_special=False), [1, 40, 50])


def test_max_tokens_is_cut_to_what_fits():
    """A prompt that leaves room for fewer tokens than asked for gets those; KV room counts too."""
    ids = {"token_ids": [5] * 90}
    assert build_request(ids, {"max_tokens": 50}, SERVED).submit.params.max_tokens == 10
    small = Served(replace(INFO, kv_slots=95), CODEC)
    assert build_request(ids, {"max_tokens": 50}, small).submit.params.max_tokens == 5
    assert build_request({"token_ids": [5] * 99}, {}, SERVED).submit.params.max_tokens == 1


def test_seed_is_drawn_only_where_needed():
    """Sampling without a seed draws one; greedy needs none; a given seed stays, 0 too."""
    drawn = {sampling_params({"temperature": 1.0, "seed": None}).seed for _ in range(5)}
    assert len(drawn) == 5
    assert sampling_params({}).seed == 0
    assert sampling_params({"temperature": 1.0, "seed": 0}).seed == 0


def test_ids():
    """A job's id on the wire is random; the user's id is kept, else it is the job's."""
    first, second = (build_request({"prompt": "a"}, {}, SERVED) for _ in range(2))
    assert first.submit.job_id != second.submit.job_id
    assert first.id == first.submit.job_id
    assert build_request({"prompt": "a", "id": "mine"}, {}, SERVED).id == "mine"
