"""An error names the field that is wrong, in the endpoint's own words, whichever part of specq found it wrong."""

import orjson
import pytest

from specq.client import ServedModel, read_requests
from specq.gateway import chat_call, completion_call, responses_call
from specq.gateway.errors import ApiError, of_job
from specq.gateway.fields import IGNORED
from specq.gateway.routes import tokens as token_call
from specq.protocol import JobError, Submit
from specq.testing.fake_broker import INFO
from specq.testing.tokenizer import tokenizer_files
from specq.text import TextCodec
from tests.each import each

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ENDPOINTS = {
    "/v1/completions": (completion_call, {"prompt": "Hi"}),
    "/v1/chat/completions": (chat_call, CHAT),
    "/v1/responses": (responses_call, {"input": "Hi"}),
}
NO_SUCH = 1_000_000  # a token id that no model here has
BEYOND = {  # of the right type, and still wrong: beyond the bounds, the model, or what goes together
    "temperature": [-0.1, 100.5],
    "top_p": [-0.1, 1.1],
    "top_k": [-2, 2**31],
    "min_p": [1.5],
    "seed": [1.5],
    "stop": ["", [""], ["a"] * 65, "a" * 257],
    "stop_token_ids": [[-1], [NO_SUCH]],
    "min_tokens": [-1, 2**20],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0],
    "logit_bias": [{"5": 101}, {str(NO_SUCH): 1}, {"x": 1}, [[5, 1], [5, 2]], {str(i): 1 for i in range(16_384)}],
    "bad_words": ["", ["a", "  "]],
    "bad_token_ids": [[[]], [[5, NO_SUCH]], [[5] * 16_384] * 3],
    "strategy": ["no such"],
    "threshold": [0.5],  # a parameter of another strategy
    "typical_eps": [0.5],
    "typical_delta": [0.5],
    "mode": ["no such"],
    "num_candidates": [65],
    "candidate_temp": [-0.5],
    "candidate_top_p": [2],
    "max_depth": [1025],
    "max_nodes": [-1],
    "tree": [[[]]],
    "fan_out_hit": [[65]],
    "fan_out_miss": [[-1]],
    "priority": [1001],
    "deadline": [0, -1],
    "grammar": [{"no_such": 1}, {"regex": ""}, "no such"],
    "structured_outputs": [{}, {"json": {}, "regex": "a"}],
    "guided_choice": [[]],
    "stream_options": [{"include_usage": True}],  # without stream
    "allowed_token_ids": [[], [-1], [NO_SUCH]],
    "prompt_logprobs": [-1, 21],
    "truncate_prompt_tokens": [0, -2, 2**20],
    "truncation_side": ["up"],
}
OWN = {
    "/v1/completions": {
        "prompt": ["", [], [NO_SUCH], ["a", ""], [[5], [NO_SUCH]], "a" * 1000], "max_tokens": [-1, 2**31],
        "logprobs": [21], "n": [0, 129], "best_of": [2], "explain": [True],
    },
    "/v1/chat/completions": {
        "messages": [[], [{"role": "wizard", "content": "a"}], [{"role": "user", "content": "a" * 1000}]],
        "max_tokens": [0],
        "max_completion_tokens": [0],
        "top_logprobs": [21, 3],
        "response_format": [{"type": "no such"}, {"type": "json_schema"}],
        "chat_template_kwargs": [{"messages": []}],
        "tool_choice": ["required"],
    },
    "/v1/responses": {
        "input": [[], [{"role": "wizard", "content": "a"}], "a" * 1000, [{"type": "reasoning", "summary": []}]],
        "max_output_tokens": [0],
        "top_logprobs": [21, 3],
        "include": [["no such"], ["message.output_text.logprobs", 5]],
        "reasoning": [{"effort": 3}, {"no_such": 1}],
        "text": [{"format": {"type": "json_schema"}}],
        "truncation": ["auto"],
    },
}  # fmt: skip


def refused(http, path, body):
    response = http.post(path, content=orjson.dumps(body), headers={"Content-Type": "application/json"})
    error = response.json().get("error", {})
    return response.status_code, error.get("type"), error.get("param")


def wrong_values(path):
    """Each field that the endpoint knows, with each wrong value: of a wrong type, and those of the tables."""
    module, _ = ENDPOINTS[path]
    known = dict.fromkeys([*module.KNOWN, *IGNORED, *module._ONLY, *module._REFUSED, "no_such_field"])
    own = OWN[path]
    for name in known:
        yield name, 3 if name == "documents" else [{"no_such": 1}]  # documents are a list of any values
        for value in [*(BEYOND.get(name, []) if name in module.KNOWN else []), *own.get(name, [])]:
            yield name, value
    assert {*own} <= {*known}


@each("path", ENDPOINTS)
def test_each_wrong_value_of_each_field_is_refused_by_the_fields_name(http, broker, path):
    """Also where the client's part or the model refuses it, and before any job is sent."""
    body = ENDPOINTS[path][1]
    found = [(name, value, refused(http, path, {**body, name: value})) for name, value in wrong_values(path)]

    assert len(found) > 90
    wrong = [(n, str(v)[:60], *r[::2]) for n, v, r in found if r != (400, "invalid_request_error", n)]
    assert wrong == []
    assert broker.num_heard(Submit) == 0


def test_a_shared_parameter_error_names_no_single_prompt(http):
    response = http.post("/v1/completions", json={"prompt": ["a", "b"], "temperature": 1000})
    of_prompt = http.post("/v1/completions", json={"prompt": [[5], [5, NO_SUCH]]})

    assert response.json()["error"]["message"] == "temperature is 1000.0, but must be in [0, 100]"
    assert of_prompt.json()["error"]["message"].startswith(f"prompt 1: token id {NO_SUCH} is outside the vocabulary")


def test_tokenize_and_detokenize_name_the_field_too(http):
    tokenize = {name: [{"no_such": 1}] for name in (*token_call._ONLY, *token_call._REFUSED, "no_such_field")}
    tokenize |= dict.fromkeys(("model", "add_special_tokens", "return_token_strs"), 3)
    chat = {"documents": 3, "tools": 3, "chat_template_kwargs": 3, "add_generation_prompt": 3, "reasoning_effort": 3}
    cases = [
        *[("/tokenize", name, {"prompt": "a", name: value}) for name, value in tokenize.items()],
        *[("/tokenize", name, {**CHAT, name: value}) for name, value in chat.items()],
        *[("/tokenize", "messages", {"messages": value}) for value in (3, [], [3], [{"role": "user", "content": 3}])],
        *[("/tokenize", "prompt", {"prompt": value}) for value in (3, ["a"])],
        *[("/detokenize", "tokens", {"tokens": value}) for value in (3, [1.5], [NO_SUCH], [-1])],
        ("/detokenize", "model", {"tokens": [5], "model": 3}),
        ("/detokenize", "no_such_field", {"tokens": [5], "no_such_field": 3}),
    ]
    found = [(path, name, refused(http, path, body)) for path, name, body in cases]

    assert [one for one in found if one[2] != (400, "invalid_request_error", one[1])] == []


def test_messages_that_the_template_refuses_are_named():
    """By each endpoint in its words: `/v1/responses` calls them its input."""
    config = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    codec = TextCodec({**tokenizer_files(), "tokenizer_config.json": orjson.dumps(config).decode()})
    named = {}
    for path in ("/v1/chat/completions", "/v1/responses"):
        module, body = ENDPOINTS[path]
        call = module.read(body)
        with pytest.raises(JobError, match="roles must alternate") as refused_job:
            read_requests(dict(call.arguments), ServedModel(INFO, codec))
        named[path] = of_job(refused_job.value, call.names).param
    with pytest.raises(ApiError, match="roles must alternate") as refused_text:
        token_call.encode(token_call.read_tokenize(CHAT), codec)

    assert named == {"/v1/chat/completions": "messages", "/v1/responses": "input"}
    assert (refused_text.value.param, refused_text.value.status) == ("messages", 400)
