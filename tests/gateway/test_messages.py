"""Anthropic's `/v1/messages`, as its own client and coding agents use it: whole, as a stream, refused, counted."""

import json

import pytest

from specq.client import Piece, Result
from specq.gateway import chat_call, make_key, messages_call, sse
from specq.gateway.answers import Head
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError, in_anthropics_form
from specq.gateway.messages_answer import Messages
from specq.gateway.messages_input import read_conversation
from specq.gateway.messages_tools import read_tools
from specq.gateway.parts import MAY_THINK, PartsForm
from specq.protocol import Failed, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, CODEC, answer, tokens
from tests.each import each
from tests.gateway.serving import connected, running
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


# --- conversations ----------------------------------------------------------------------------------------------------

TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
BILLING = "x-anthropic-billing-header: cc_version=2; cch=1a2b;"
CALLED = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}


def said(role, *blocks):
    return {"role": role, "content": list(blocks)}


def text(value, **more):
    return {"type": "text", "text": value, **more}


def result(content, tool_use_id="toolu_1", **more):
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": content, **more}


def call(arguments='{"a": 1}', call_id="toolu_1"):
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


@each(
    ("system", "messages", "expected"),
    [
        ("Be brief.", [{"role": "user", "content": "a"}], [("system", "Be brief."), ("user", "a")]),
        (
            [text("A", cache_control={"type": "ephemeral"}), text("B")],
            [said("user", text("a"), text("b"))],
            [("system", "A\nB"), ("user", "a\nb")],
        ),
        ([text(BILLING), text("A")], [said("user", text("a"))], [("system", "A"), ("user", "a")]),
        (f"{BILLING}\nA", [said("user", text("a"))], [("system", "A"), ("user", "a")]),
        ([text(BILLING)], [said("user", text("a"))], [("user", "a")]),
        ("", [said("user", text("a")), {"role": "user", "content": "b"}], [("user", "a\nb")]),
        (
            "",
            [said("user", text("a")), said("system", text("s")), said("assistant"), said("user", text("b"))],
            [("user", "a"), ("system", "s"), ("assistant", ""), ("user", "b")],
        ),
    ],
)
def test_texts_of_a_conversation(system, messages, expected):
    read = read_conversation({"system": system, "messages": messages})

    assert read == [{"role": role, "content": content} for role, content in expected]


def test_calls_and_results_of_a_conversation():
    """Each result is a message of its own; what the assistant thought, said and called is one message."""
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    read = read_conversation(
        {
            "messages": [
                said("user", text("add")),
                said("assistant", {"type": "redacted_thinking", "data": "x"}, thought, text("Yes."), CALLED),
                said("assistant", CALLED | {"id": "toolu_2", "input": {}}),
                said("user", result("2"), result([text("3"), text("4")], "toolu_2", is_error=True), text("So?")),
                said("user", result(None, "toolu_3")),
            ]
        }
    )

    assert read == [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_content": "Hm.",
            "tool_calls": [call(), call("{}", "toolu_2")],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "3\n4"},
        {"role": "user", "content": "So?"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
    ]


@each(
    ("message", "complaint"),
    [
        (said("user", {"type": "image", "source": {}}), r"messages\[0\].content\[0\] is of type 'image'"),
        (said("user", {"type": "document", "source": {}}), "is of type 'document'"),
        (said("user", CALLED), "is of type 'tool_use'; supported here: text, tool_result"),
        (said("user", result([{"type": "image"}])), r"messages\[0\].content\[0\].content\[0\] is of type 'image'"),
        (said("assistant", {"type": "server_tool_use"}), "is of type 'server_tool_use'"),
        (said("assistant", {"type": "tool_use", "id": "a", "name": "b", "input": "{}"}), "input is a string"),
        (said("assistant", {"type": "tool_use", "id": "a", "input": {}}), "name is missing"),
        (said("user", {"type": "text"}), "text is missing"),
        (said("user", "a"), r"messages\[0\].content\[0\] is a string, but must be an object"),
        (said("tool", text("a")), "role is 'tool', but must be one of user, assistant, system"),
        ({"role": "user"}, r"messages\[0\].content is missing"),
        ({"role": "user", "content": 3}, r"messages\[0\].content is a number, but must be a list"),
        ("Hi", r"messages\[0\] is a string"),
    ],
)
def test_wrong_blocks_are_named(message, complaint):
    with pytest.raises(ApiError, match=complaint) as raised:
        read_conversation({"messages": [message]})

    assert raised.value.param == "messages"


# --- tools ------------------------------------------------------------------------------------------------------------

FUNCTION = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}


@each(
    ("choice", "expected"),
    [
        (None, {"tool_choice": "auto"}),
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
)
def test_tools_in_the_form_of_a_chat(choice, expected):
    given = {"tools": [{**TOOL, "type": "custom", "cache_control": {}}]} | ({"tool_choice": choice} if choice else {})

    assert read_tools(given) == {"tools": [{"type": "function", "function": FUNCTION}], **expected}
    assert read_tools({"tools": [TOOL | {"strict": True}]})["tools"][0]["function"]["strict"] is True


@each(
    ("fields", "complaint"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "is of type 'web_search_20250305'"),
        ({"tools": [{"name": "add"}]}, r"tools\[0\].input_schema is missing"),
        ({"tools": [TOOL | {"name": 3}]}, r"tools\[0\].name is a number"),
        ({"tools": [3]}, r"tools\[0\] is a number"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is given without tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice is a string"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ],
)
def test_wrong_tools_are_named(fields, complaint):
    with pytest.raises(ApiError, match=complaint) as raised:
        read_tools(fields)

    assert raised.value.param in fields


# --- blocks of an answer ----------------------------------------------------------------------------------------------

FORM = PartsForm("hermes", frozenset(["add", "sub"]), MAY_THINK, "k")
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "sub"}</tool_call>'
HEAD = Head("msg_1", 0, "fake", "f", (7,))


def whole_and_stream(said, finish="stop", cut=3):
    """Return the whole answer of a text, and what a client assembles from the stream of its pieces."""
    result = Result("r", None, said, [1, 2], finish)
    form = Messages(Call({}, form=FORM))
    stream = form.events(HEAD, sse.start(1), with_ids=False)
    pieces = [Piece(said[start : start + cut]) for start in range(0, len(said), cut)]
    data = stream.opening() + b"".join(map(stream.take, pieces)) + stream.take(Piece("", result=result))
    return form.whole(HEAD, [result]), assembled((data + stream.closing()).decode())


def assembled(data):
    """Return the message that a stream describes, as Anthropic's client assembles it; each event where it may be."""
    message, texts = None, {}
    for event in (json.loads(one.split("data: ")[1]) for one in data.strip().split("\n\n")):
        match event["type"]:
            case "message_start":
                assert message is None
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"]) == len(texts)
                message["content"].append(event["content_block"])
                texts[event["index"]] = ""
            case "content_block_delta":
                kind, delta = event["delta"].pop("type"), event["delta"]
                block = message["content"][event["index"]]
                if kind == "input_json_delta":
                    texts[event["index"]] += delta["partial_json"]
                else:
                    assert kind.removesuffix("_delta") in (block["type"], "signature")
                    block |= {name: block[name] + more for name, more in delta.items()}
            case "content_block_stop":
                block, given = message["content"][event["index"]], texts[event["index"]]
                if given:
                    block["input"] = json.loads(given) if given.endswith("}") else given
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
            case "message_stop" | "ping":
                pass
    return message


@each("cut", [1, 2, 7, 1000])
def test_thinking_text_and_calls_are_blocks(cut):
    whole, stream = whole_and_stream(f"<think>Hm.</think>\n\nYes.\n{CALLS}", cut=cut)

    assert whole == stream
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole["content"][0]["thinking"], whole["content"][1]["text"]) == ("Hm.", "Yes.")
    assert [(call["name"], call["input"]) for call in whole["content"][2:]] == [("add", {"a": 1}), ("sub", {})]
    assert len({call["id"] for call in whole["content"][2:]}) == 2
    assert whole["stop_reason"] == "tool_use"


@each(
    ("said", "finish", "kinds", "reason"),
    [
        ("", "stop", ["text"], "end_turn"),
        ("Yes.", "length", ["text"], "max_tokens"),
        ("Yes. <tool", "length", ["text"], "max_tokens"),
        ("Yes.", "cancelled", ["text"], "cancelled"),
        ("<think>Hm", "length", ["thinking"], "max_tokens"),
        (CALLS, "length", ["tool_use", "tool_use"], "max_tokens"),
        ("<tool_call>not one</tool_call>", "stop", ["text"], "end_turn"),
    ],
)
def test_ends_of_answers(said, finish, kinds, reason):
    whole, stream = whole_and_stream(said, finish)

    assert whole == stream
    assert ([block["type"] for block in whole["content"]], whole["stop_reason"]) == (kinds, reason)


def test_a_call_that_is_cut():
    """Text in a whole answer; in a stream a block whose JSON is not complete, as at Anthropic."""
    said = '<tool_call>{"name": "add", "arguments": {"a": '
    whole, stream = whole_and_stream(said, "length")

    assert whole["content"] == [{"type": "text", "text": said}]
    assert (stream["content"][0]["type"], stream["content"][0]["input"]) == ("tool_use", '{"a": ')
    assert whole["stop_reason"] == stream["stop_reason"] == "max_tokens"


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
