"""Anthropic's `/v1/messages`, as its own client and coding agents use it: whole, as a stream, refused, counted."""

import json

import pytest

from specq.gateway import chat_call, make_key, messages_call
from specq.gateway.errors import ApiError, in_anthropics_form
from specq.protocol import Failed, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, CODEC, answer, tokens
from tests.each import each
from tests.gateway.serving import connected, running
from tests.gateway.test_messages_answer import assembled
from tests.gateway.test_messages_input import text
from tests.gateway.test_tools import CITY, TEXT, TOOLS, model

PATH = "/v1/messages"
BODY = {"model": "fake", "max_tokens": 60, "messages": [{"role": "user", "content": "Hi"}]}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27", "x-api-key": "none"}


def post(http, path=PATH, **changes):
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not ...}
    return http.post(path, json=body, headers=HEADERS)


def events_of(response):
    """Return the events of a stream, each checked to have its type as its name."""
    read = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_message(http):
    message = post(http).json()

    usage = message.pop("usage")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage.pop("speculation")["accepted_tokens"] == 6
    counted = post(http, f"{PATH}/count_tokens", max_tokens=...).json()["input_tokens"]
    assert usage == {
        "input_tokens": counted - 2,  # what the broker had in its KV is counted apart
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len(ANSWER_IDS),
    }


def test_a_message_that_is_cut(http):
    message = post(http, max_tokens=3).json()

    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)


def test_a_stop_sequence_is_named(http):
    """The text ends before it. A sequence that is not in the text does not matter."""
    asked = {"stop_sequences": ["no such", " and", "END"], "max_tokens": 70}
    message, events = post(http, **asked).json(), events_of(post(http, stream=True, **asked))

    assert message["content"][0]["text"] == ANSWER.partition("END")[0]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_stream(http):
    """The order of the events, the text in deltas, and at the end the numbers of the whole answer."""
    whole, response = post(http).json(), post(http, stream=True)
    events = events_of(response)
    kinds = [event["type"] for event in events]

    deltas = kinds.count("content_block_delta")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert deltas > 2
    assert kinds == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"] + 2
    assert events[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert "".join(event["delta"]["text"] for event in events[3 : 3 + deltas]) == ANSWER
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert {**events[-2]["usage"], "speculation": 0} == {**whole["usage"], "speculation": 0}


def test_an_answer_without_text_has_one_empty_block(http, broker):
    broker.reply = lambda message: (
        [tokens(message.job_id, 0, [2], "stop")] if isinstance(message, Submit) else answer(message)
    )
    events = events_of(post(http, stream=True))

    assert post(http).json()["content"] == [{"type": "text", "text": ""}]
    assert [event["type"] for event in events[2:4]] == ["content_block_start", "content_block_stop"]


def test_parameters_reach_the_job(http, broker):
    """Anthropic's own, and specq's beside them; a limit beyond the room is the room."""
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["END"], "seed": 3, "mode": "plain"}
    harmless = {"metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": [], "system": None}
    edits = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    post(http, max_tokens=32_000, **asked, **harmless, **edits)
    post(http)
    submit, other = broker.wait_for(Submit, 2)
    params = submit.params

    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 4, 3)
    assert (params.stop, submit.speculation.mode) == (("END",), "plain")
    assert params.max_tokens == 100 - len(submit.prompt_ids)
    assert (other.params.max_tokens, other.params.temperature, other.params.stop) == (60, 1.0, ())


def test_a_last_message_of_the_assistant_is_continued(http, broker):
    """As at Anthropic; the prompt ends within it."""
    begun = [*BODY["messages"], {"role": "assistant", "content": [{"type": "text", "text": "A w"}]}]
    counted = post(http, f"{PATH}/count_tokens", messages=begun).json()["input_tokens"]
    post(http, messages=begun)
    (submit,) = broker.wait_for(Submit)

    assert CODEC.decode(submit.prompt_ids, skip_special=False).endswith("<|im_start|>assistant\nA w")
    assert counted == len(submit.prompt_ids)


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@each(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_format_is_the_grammar_of_the_job(fields):
    call = messages_call.read({**BODY, **fields})

    assert call.arguments["grammar"] == {"json_schema": SCHEMA}
    assert call.chosen.field in fields


def test_effort_and_thinking_are_variables_of_the_template():
    """Thinking is off unless it is asked for."""

    def variables(**fields):
        return messages_call.read({**BODY, **fields}).arguments["chat_template_kwargs"]

    assert variables(output_config={"effort": "low"})["reasoning_effort"] == "low"
    assert variables()["enable_thinking"] is False
    assert variables(thinking={"type": "disabled"})["enable_thinking"] is False
    assert variables(thinking={"type": "adaptive", "display": "omitted"})["enable_thinking"] is True
    assert variables(thinking={"type": "enabled", "budget_tokens": 2048})["enable_thinking"] is True


def test_a_repeated_message_finds_its_job(http, broker):
    """With an Idempotency-Key, as at the other endpoints; a stream cannot be resumed in the middle."""
    repeat = {**HEADERS, "Idempotency-Key": "m1"}
    first, second = (http.post(PATH, json=BODY, headers=repeat).json() for _ in range(2))
    resumed = http.post(PATH, json={**BODY, "stream": True}, headers={**repeat, "Last-Event-ID": "3"})

    assert first["id"] == second["id"]
    assert (resumed.status_code, resumed.json()["type"]) == (400, "error")


def test_models_as_at_anthropic(http):
    """Only for clients that send Anthropic's header."""
    (model,) = http.get("/v1/models", headers=HEADERS).json()["data"]
    one = http.get("/v1/models/fake", headers=HEADERS).json()

    assert (one["id"], one["type"], one["display_name"], one["max_tokens"]) == ("fake", "model", "fake", 100)
    assert model == one
    assert one["created_at"].endswith("Z")
    assert "type" not in http.get("/v1/models/fake").json()


def test_a_thread_is_refused_with_the_code_that_clients_know(http):
    """Anthropic's client then sends the whole conversation."""
    error = post(http, thread={"type": "create"}).json()["error"]

    assert error["details"] == {"error_code": "thread_unsupported_request"}


# --- errors -----------------------------------------------------------------------------------------------------------


@each(
    ("changes", "status", "kind", "message"),
    [
        ({"max_tokens": ...}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens is 0"),
        ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
        ({"messages": "Hi"}, 400, "invalid_request_error", "messages is a string, but must be a list"),
        ({"temperature": 1000}, 400, "invalid_request_error", "temperature is 1000"),
        ({"stop_sequences": "END"}, 400, "invalid_request_error", "stop_sequences is a string"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences: "),
        ({"model": "other"}, 404, "not_found_error", "'other' is not served here"),
        ({"output_config": {"format": {"type": "text"}}}, 400, "invalid_request_error", "output_config.format.type is"),
        ({"output_config": {"task": 3}}, 400, "invalid_request_error", "output_config has an unknown part 'task'"),
        ({"thinking": {"type": "between_tools"}}, 400, "invalid_request_error", "thinking.type is 'between_tools'"),
        ({"container": "x"}, 400, "invalid_request_error", "container is not supported"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_1"}]}},
            400,
            "invalid_request_error",
            "edits[0] is",
        ),
        ({"max_token": 3}, 400, "invalid_request_error", "unknown field 'max_token'"),
        ({"messages": [{"role": "user", "content": "a" * 400}]}, 400, "invalid_request_error", "the prompt has"),
    ],
)
def test_refusals_have_anthropics_form(http, changes, status, kind, message):
    for stream in (False, True):
        response = post(http, stream=stream, **changes)

        assert response.status_code == status
        assert (response.json()["type"], response.json()["error"]["type"]) == ("error", kind)
        assert message in response.json()["error"]["message"]


def test_refusals_before_the_endpoint_have_the_same_form(http, broker, tmp_path, own_cache):
    """A wrong method, form or key; the key is read from `x-api-key`."""
    assert http.get(PATH).json()["error"]["type"] == "invalid_request_error"
    assert http.post(f"{PATH}/batches", json={}).json()["error"]["type"] == "not_found_error"
    assert http.post(PATH, content=b"{").json()["type"] == "error"
    key = make_key(tmp_path / "api.toml", "alice")
    with running(broker.address, api_keys=str(tmp_path / "api.toml")) as gateway, connected(gateway) as locked:
        refused = post(locked)
        allowed = locked.post(PATH, json=BODY, headers={"x-api-key": key})

    error = refused.json()
    assert (refused.status_code, error["type"], error["error"]["type"]) == (401, "error", "authentication_error")
    assert allowed.status_code == 200


def test_a_stream_that_fails_ends_with_an_error(http, broker):
    def fail(message):
        if not isinstance(message, Submit):
            return answer(message)
        return [
            tokens(message.job_id, 0, ANSWER_IDS[:3]),
            Failed(job_id=message.job_id, code="engine", reason="broken"),
        ]

    broker.reply = fail
    events = events_of(post(http, stream=True))

    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


@each(
    ("status", "expected"),
    [(413, (413, "request_too_large")), (503, (529, "overloaded_error")), (504, (504, "timeout_error"))],
)
def test_statuses_of_errors(status, expected):
    found, body = in_anthropics_form(ApiError("x", status))

    assert (found, body["error"]["type"]) == expected


# --- models with tools and thinking -----------------------------------------------------------------------------------

WEATHER = {"name": "weather", "input_schema": CITY, "strict": True}
ENABLED = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def test_a_model_that_thinks_and_calls():
    """The blocks of a whole answer and of a stream, and what the model received: thinking is on, calls are enforced."""
    with model("qwen", TEXT) as (broker, gateway), connected(gateway) as http:
        asked = {"tools": [WEATHER], "max_tokens": 300, **ENABLED}
        whole, streamed = post(http, **asked).json(), assembled(post(http, **asked, stream=True).text)
        counted = post(http, f"{PATH}/count_tokens", **asked).json()["input_tokens"]
        submit, _ = broker.wait_for(Submit, 2)
        post(http, tools=[WEATHER])
        plain = broker.wait_for(Submit, 3)[-1]

    thinking, spoken, *calls = whole["content"]
    cities = [(one["name"], one["input"]["city"]) for one in calls]
    assert (thinking["thinking"], spoken["text"]) == ("Is it cold?", "I look.")
    assert cities == [("weather", "Oslo"), ("weather", "Rome")]
    assert whole["stop_reason"] == streamed["stop_reason"] == "tool_use"
    without_ids = [[{**block, "id": ""} for block in answer["content"]] for answer in (whole, streamed)]
    assert without_ids[0] == without_ids[1]
    usage = whole["usage"]
    assert counted == len(submit.prompt_ids) == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert submit.params.grammar
    assert len(plain.prompt_ids) > len(submit.prompt_ids)  # a prompt without thinking has an empty thought


def test_thinking_is_shown_only_where_it_is_asked_for():
    """A model that always thinks; its thoughts are left out, since such clients do not expect their blocks."""
    with model("opens", "Cold?</think>\n\nYes.") as (_, gateway), connected(gateway) as http:
        asked, adaptive = (post(http, **fields).json() for fields in (ENABLED, {"thinking": {"type": "adaptive"}}))
        for fields in ({}, {"thinking": {"type": "disabled"}}):
            assert post(http, **fields).json()["content"] == [text("Yes.")]
            assert assembled(post(http, stream=True, **fields).text)["content"] == [text("Yes.")]

    assert asked["content"] == adaptive["content"]
    assert [block["type"] for block in asked["content"]] == ["thinking", "text"]


def test_thinking_that_a_model_cannot_do_is_explained(http):
    """A model may also decide to think or not; then it does not."""
    refused = post(http, **ENABLED)

    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "the chat template of this model has no <think>" in refused.json()["error"]["message"]
    assert post(http, thinking={"type": "adaptive"}).status_code == 200
    assert post(http, f"{PATH}/count_tokens", **ENABLED).status_code == 200


@each("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}, {"type": "auto"}])
def test_tools_are_those_of_a_chat(choice):
    chosen = {"any": "required", "tool": {"type": "function", "function": {"name": "weather"}}}
    asked = messages_call.read({**BODY, "tools": [WEATHER], "tool_choice": choice})
    chat = {"messages": BODY["messages"], "tools": TOOLS, "tool_choice": chosen.get(choice["type"], choice["type"])}

    assert asked.tools == chat_call.read(chat).tools


def test_a_format_and_tools_go_together_as_in_a_chat():
    """JSON beside calls; no other grammar."""
    form = {"type": "json_schema", "schema": SCHEMA}
    call = messages_call.read({**BODY, "tools": [WEATHER], "output_format": form})

    assert (call.arguments["grammar"], len(call.tools.functions)) == ({"json_schema": SCHEMA}, 1)
    with pytest.raises(ApiError, match="grammar is not supported together with tools"):
        messages_call.read({**BODY, "tools": [WEATHER], "grammar": {"regex": "a"}})


def test_tools_of_a_template_without_any_are_counted():
    """They are in the prompt in a form of specq's own."""
    with model("chatml", "Yes.") as (_, gateway), connected(gateway) as http:
        plain, counted = (
            post(http, f"{PATH}/count_tokens", **fields).json()["input_tokens"] for fields in ({}, {"tools": [WEATHER]})
        )
        usage = post(http, tools=[WEATHER]).json()["usage"]

    assert plain < counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
