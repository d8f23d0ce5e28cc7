"""What evaluations and tools ask for: the prompt and its log-probabilities in the answer, token ids, ends of texts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from specq.protocol import Submit, Tokens
from specq.protocol.logprobs import prompt_rows
from specq.protocol.types import ScoredRows
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, answer
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import VOCAB, toy_scores
from specq.text import TextCodec
from tests.each import each

CODEC = TextCodec(tokenizer_files())
PROMPT = "Hi, you"
IDS = CODEC.encode(PROMPT)
TEXTS = [CODEC.tokens[token].text for token in IDS]


def values_of(token_ids, num_top):
    return toy_scores(0, ScoredRows(np.array(token_ids[1:], np.int32), num_top))


def scoring(message):
    """Answer like the small broker, with log-probabilities where a job asks for them."""
    for reply in answer(message):
        if isinstance(reply, Tokens) and isinstance(message, Submit) and len(reply.token_ids):
            params, fields = message.params, {}
            if params.logprobs >= 0:
                own = values_of([0, *reply.token_ids.tolist()], params.logprobs)
                fields = {"logprobs": own.tokens, "top_ids": own.top_ids.ravel(), "top_logprobs": own.top.ravel()}
            if params.prompt_logprobs >= 0 and not reply.base_len:
                rows = prompt_rows(values_of(message.prompt_ids.tolist(), params.prompt_logprobs))
                fields["prompt_rows"] = rows.reshape(-1).view(np.uint8)
            yield replace(reply, **fields)
        else:
            yield reply


@pytest.fixture
def post(http, broker):
    broker.reply = scoring

    def send(path="/v1/completions", **body):
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return response.json()
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    return send


def submitted(broker):
    return broker.wait_for(Submit)[-1]


def expected_prompt(token_ids, num_top):
    """The lists of a prompt's log-probabilities in OpenAI's form."""
    values = values_of(token_ids, num_top)
    tops = []
    for token, own, ids, top in zip(
        token_ids[1:], values.tokens.tolist(), values.top_ids.tolist(), values.top.tolist(), strict=True
    ):
        named = {CODEC.tokens[i].text: value for i, value in zip(ids, top, strict=True)}
        tops.append(named | {CODEC.tokens[token].text: own})
    return [None, *values.tokens.tolist()], [None, *tops]


@each("num_tokens", [0, 1, 50])
@each("source", ["text", "ids", "batch"])
def test_an_echo_has_the_prompt_and_its_log_probabilities(post, broker, num_tokens, source):
    """As lm-evaluation-harness requests and reads it."""
    prompt = {"text": PROMPT, "ids": IDS, "batch": [IDS, IDS[:3]]}[source]
    found = post(prompt=prompt, echo=True, logprobs=1, max_tokens=num_tokens, temperature=0)
    generated = ANSWER_IDS[:num_tokens]
    assert submitted(broker).params.max_tokens == max(num_tokens, 1)
    assert found["usage"]["completion_tokens"] == len(generated) * len(found["choices"])
    for choice, token_ids in zip(found["choices"], [IDS, IDS[:3]], strict=False):
        logprobs, texts = choice["logprobs"], [CODEC.tokens[token].text for token in token_ids]
        assert choice["text"] == "".join(texts) + ANSWER[: len(choice["text"]) - len("".join(texts))]
        assert choice["finish_reason"] == ("stop" if num_tokens == 50 else "length")
        assert logprobs["tokens"] == texts + [CODEC.tokens[token].text for token in generated]
        assert {len(values) for values in logprobs.values()} == {len(token_ids) + len(generated)}
        own, top = expected_prompt(token_ids, 1)
        assert logprobs["token_logprobs"][: len(own)] == own
        assert logprobs["top_logprobs"][: len(top)] == top
        offsets = [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
        assert logprobs["text_offset"][: len(token_ids) + 1] == offsets[: len(token_ids) + 1]


def test_an_echo_without_log_probabilities_asks_for_none(post, broker):
    (choice,) = post(prompt=PROMPT, echo=True, max_tokens=50)["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPT + ANSWER, None)
    assert submitted(broker).params.prompt_logprobs == -1


@each("num_tokens", [0, 50])
def test_an_echo_as_a_stream_is_the_same(post, num_tokens):
    options = {"prompt": [IDS, IDS[:3]], "echo": True, "logprobs": 2, "max_tokens": num_tokens, "n": 2}
    whole, chunks = post(**options), post(**options, stream=True)
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for one in own if one["logprobs"] for value in one["logprobs"][name]] == values
        assert own[-1]["finish_reason"] == choice["finish_reason"]


@each("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_have_vllms_form(post, broker, path):
    """By token id, the prompt's own token first; in a chat they belong to the answer."""
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    for num_top in (0, 2):
        found = post(path, **asked, prompt_logprobs=num_top, return_token_ids=True, max_tokens=50)
        token_ids = submitted(broker).prompt_ids.tolist()
        place = found["choices"][0] if path == "/v1/completions" else found
        values = values_of(token_ids, num_top)
        assert place["prompt_token_ids"] == token_ids
        assert found["choices"][0]["token_ids"] == ANSWER_IDS
        assert place["prompt_logprobs"][0] is None
        for i, entry in enumerate(place["prompt_logprobs"][1:]):
            ids = [token_ids[i + 1], *values.top_ids[i].tolist()]
            assert list(entry) == list(map(str, dict.fromkeys(ids)))
            assert entry[str(ids[0])]["logprob"] == values.tokens[i]
            assert entry[str(ids[0])]["decoded_token"] == CODEC.tokens[ids[0]].text
            assert [entry[str(token)]["rank"] for token in ids[1:]] == list(range(1, num_top + 1))
            assert [entry[str(token)]["logprob"] for token in ids[2:]] == values.top[i, 1:].tolist()
    plain = post(path, **asked, max_tokens=50)
    values = {**plain, **plain["choices"][0]}
    assert [values[name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")] == [None] * 3


@each("value", [-1, 21, 1.5, "2"])
def test_a_number_of_likeliest_tokens_beyond_its_bounds_is_named_with_them(http, value):
    for name in ("prompt_logprobs", "logprobs"):
        error = http.post("/v1/completions", json={"prompt": PROMPT, name: value}).json()["error"]
        assert error["message"] == f"{name} is {value!r}, but must be a whole number from 0 to 20"
        assert error["param"] == name


def test_a_stream_may_not_ask_for_prompt_logprobs(http):
    response = http.post("/v1/completions", json={"prompt": PROMPT, "prompt_logprobs": 1, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


@each("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_all_token_ids(post, broker, path):
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    held = {"stop": [ANSWER[:200] + "!"]}  # all text is held back, and tokens are not
    chunks = post(path, **asked, **held, return_token_ids=True, stream=True, max_tokens=50)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == ANSWER_IDS
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    told += [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
    assert told == [submitted(broker).prompt_ids.tolist()]


def test_tokens_may_be_shown_as_their_ids(post):
    options = {"return_tokens_as_token_ids": True, "max_tokens": 3, "temperature": 0}
    (choice,) = post(prompt=IDS, logprobs=1, **options)["choices"]
    names = [f"token_id:{token}" for token in ANSWER_IDS[:3]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
    (choice,) = post("/v1/chat/completions", **chat, **options)["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == names
    assert choice["logprobs"]["content"][0]["bytes"] == list(names[0].encode())


def test_the_stop_reason_is_what_ended_the_text(post):
    middle = ANSWER[4:7]
    for fields, reason, text in (
        ({}, None, ANSWER),
        ({"stop_token_ids": [ANSWER_IDS[-1]]}, ANSWER_IDS[-1], ANSWER),
        ({"stop": ["zz", middle]}, middle, ANSWER.partition(middle)[0]),
        ({"stop": middle, "include_stop_str_in_output": True}, middle, ANSWER.partition(middle)[0] + middle),
    ):
        (choice,) = post(prompt=PROMPT, max_tokens=50, **fields)["choices"]
        assert (choice["stop_reason"], choice["text"]) == (reason, text)
        last = post(prompt=PROMPT, max_tokens=50, stream=True, **fields)
        assert "".join(chunk["choices"][0]["text"] for chunk in last) == text
        assert last[-1]["choices"][0]["stop_reason"] == reason
    (choice,) = post(prompt=PROMPT, max_tokens=2)["choices"]
    assert (choice["stop_reason"], choice["finish_reason"]) == (None, "length")


def test_prompts_are_truncated_from_the_left_or_the_right(post, broker):
    for fields, kept in (
        ({"truncate_prompt_tokens": 3}, IDS[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, IDS[:3]),
        ({"truncate_prompt_tokens": 99}, IDS),
        ({"truncate_prompt_tokens": -1}, IDS),
    ):
        (choice,) = post(prompt=PROMPT, echo=True, max_tokens=0, **fields)["choices"]
        assert submitted(broker).prompt_ids.tolist() == kept
        assert choice["text"] == CODEC.decode(kept)
    post(prompt=[5] * 3000, truncate_prompt_tokens=-1, max_tokens=1)
    assert len(submitted(broker).prompt_ids) < 3000


def test_the_last_message_is_continued(post, broker):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    post("/v1/chat/completions", messages=messages, continue_final_message=True, add_generation_prompt=False)
    text = CODEC.decode(submitted(broker).prompt_ids, skip_special=False)
    assert text.rstrip().endswith("Well,")
    post("/v1/chat/completions", messages=messages)
    assert not CODEC.decode(submitted(broker).prompt_ids, skip_special=False).rstrip().endswith("Well,")
    for wrong in ({"add_generation_prompt": True}, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}):
        body = {"messages": messages, "continue_final_message": True, **wrong}
        with pytest.raises(AssertionError, match="continue"):
            post("/v1/chat/completions", **body)


def test_allowed_tokens_reach_the_job(post, broker):
    post(prompt=PROMPT, allowed_token_ids=[5, 7], max_tokens=1)
    assert submitted(broker).params.allowed_token_ids == (5, 7)
    assert VOCAB > 7
