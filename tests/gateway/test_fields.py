"""Request bodies: each field with each wrong type is refused by name, or harmless. No input is a server error."""

from itertools import product
from typing import get_args

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatFields
from openai.types.completion_create_params import CompletionCreateParamsBase as PlainFields
from openai.types.responses import ResponseIncludable
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponsesFields

from specq.client import check_values
from specq.gateway import chat_call, completion_call, messages_call, responses_call
from specq.gateway.errors import ApiError
from specq.gateway.fields import IGNORED, REFUSED, SAMPLING, SPECULATION
from specq.gateway.routes import tokens as token_call
from specq.protocol import JobError
from tests.each import each

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PLAIN = {"prompt": "Hi"}
WRONG = [
    None, True, False, 0, -1, 1.5, 1e400, 2**70, "", "x", "\ud800", [], [None], [[]], [{}], {}, {"x": None}, [1, "a"],
]  # fmt: skip
READERS = {
    "chat": (chat_call, CHAT),
    "plain": (completion_call, PLAIN),
    "responses": (responses_call, {"input": "Hi"}),
    "messages": (messages_call, {**CHAT, "max_tokens": 9}),
}


def fields_of(endpoint):
    """Return each field that an endpoint has a rule for."""
    module, _ = READERS[endpoint]
    return (*module.KNOWN, *IGNORED, *module._ONLY, *module._REFUSED)


OPENAI = {"chat": ChatFields, "plain": PlainFields, "responses": ResponsesFields}


@each("endpoint", OPENAI)
def test_each_field_of_openais_client_is_known(endpoint):
    """Honoured, ignored, or refused with a reason of its own."""
    assert set(OPENAI[endpoint].__annotations__) <= set(fields_of(endpoint))


def read_all(module, body):
    """Read as far as no model is needed; return the job's parameters."""
    call = module.read(body)
    sources = ("prompt", "messages", "token_ids", "chat_template_kwargs")
    check_values({name: value for name, value in call.arguments.items() if name not in sources})
    return call


def complaint(module, body):
    try:
        read_all(module, body)
    except (ApiError, JobError) as error:
        return error
    return None


@each(("endpoint", "name"), [(endpoint, name) for endpoint in READERS for name in fields_of(endpoint)])
def test_wrong_types_are_refused_or_harmless(endpoint, name):
    module, body = READERS[endpoint]
    others = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # which have one name in the job
    for value in WRONG:
        error = complaint(module, {**body, name: value})
        if isinstance(error, ApiError):
            assert (error.status, bool(error.param)) == (400, True)
        elif error is not None:
            assert name in str(error) or name in others, (name, value, str(error))


@each(("endpoint", "name"), product(READERS, [*REFUSED, "functions", "nonsense", "temprature"]))
def test_what_cannot_be_honoured_is_refused_by_name(endpoint, name):
    module, body = READERS[endpoint]

    with pytest.raises(ApiError, match=name) as raised:
        module.read({**body, name: 1})

    assert raised.value.param == name


@each("endpoint", READERS)
def test_null_is_like_not_given(endpoint):
    module, body = READERS[endpoint]
    names = [name for name in fields_of(endpoint) if name not in body]

    assert read_all(module, body | dict.fromkeys(names)) == read_all(module, body)


def test_a_slip_is_guessed():
    with pytest.raises(ApiError, match="did you mean 'temperature'"):
        chat_call.read({**CHAT, "temprature": 1})


@each("body", [None, [], "x", 3, True])
def test_a_body_is_an_object(body):
    for read in (chat_call.read, completion_call.read, token_call.read_tokenize, token_call.read_detokenize):
        with pytest.raises(ApiError, match="not a JSON object"):
            read(body)


def test_specqs_own_options_are_taken():
    """All that a job may be asked for is a field, but for what the endpoint names otherwise."""
    from specq.client.parameters import NAMES

    assert set(NAMES) - {"max_tokens", "logprobs", "prompt_logprobs"} == {*SAMPLING, *SPECULATION} - {
        "priority",
        "deadline",
        "cache_salt",
    }


@each(
    "messages",
    [
        [], [[]], [{}], ["x"], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}], [{"role": "user"}],
        [{"role": "system", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["x"]}],
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read(messages):
    with pytest.raises(ApiError, match="messages"):
        chat_call.read({"messages": messages})


@each("role", ["wizard", "User", "", "ipython", "user "])
def test_a_role_that_there_is_not_is_named(role):
    """With its message, and the roles that there are: a template would render it as it is, or leave the message out."""
    said = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    chat_roles = "system, developer, user, assistant, tool, function"
    cases = [
        (chat_call.read, "messages", chat_roles),
        (token_call.read_tokenize, "messages", chat_roles),
        (responses_call.read, "input", "system, developer, user, assistant"),
    ]
    for read, field, roles in cases:
        with pytest.raises(ApiError) as refused:
            read({field: said})
        assert str(refused.value) == f"{field}[1].role is {role!r}, but must be one of {roles}"
        assert (refused.value.status, refused.value.param, refused.value.code) == (400, field, "invalid_value")


@each("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_each_role_may_say_something_and_an_empty_text(role):
    for content in ("a", ""):
        said = [{"role": role, "content": content}]
        assert chat_call.read({"messages": said}).arguments["messages"] == said


@each(
    ("message", "reason"),
    [
        ({"role": "tool", "tool_call_id": "1"}, 'has no "content"'),
        ({"role": "function", "name": "f", "content": None}, 'has no "content"'),
        ({"role": "assistant"}, 'has neither "content" nor "tool_calls"'),
        ({"role": "assistant", "content": None, "tool_calls": []}, 'has neither "content" nor "tool_calls"'),
        ({"role": "user", "content": []}, ".content is an empty list, but must have at least one part"),
    ],
)
def test_a_message_without_content_is_refused(message, reason):
    with pytest.raises(ApiError) as refused:
        chat_call.read({"messages": [{"role": "user", "content": "a"}, message]})
    assert str(refused.value) in (f"messages[1] {reason}", f"messages[1]{reason}")


def test_an_assistant_message_may_be_empty():
    """As one that was stopped at once, or that called a tool."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    read = chat_call.read({"messages": [{"role": "assistant", "content": []}, called]})
    assert read.arguments["messages"] == [{"role": "assistant", "content": ""}, called]
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    in_part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    read = chat_call.read({"messages": [refused, in_part, {"role": "assistant", "reasoning_content": "Hm."}]})
    assert [message.get("content") for message in read.arguments["messages"]] == [None, "No.", None]


@each(
    ("prompt", "name"),
    [("", "prompt"), ([], "prompt"), ([""], "prompt[0]"), (["a", ""], "prompt[1]"), ([[1], []], "prompt[1]")],
)
def test_an_empty_prompt_is_refused(prompt, name):
    with pytest.raises(ApiError) as refused:
        completion_call.read({"prompt": prompt})
    assert str(refused.value) == f"{name} is empty, but must have at least one token"
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_an_empty_part_of_the_input_is_refused():
    with pytest.raises(ApiError, match=r"input\[0\]\.content is an empty list, but must have at least one part"):
        responses_call.read({"input": [{"role": "user", "content": []}]})


def test_parts_of_text_become_one():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat_call.read({"messages": [{"role": "user", "content": parts}]})

    assert call.arguments["messages"] == [{"role": "user", "content": "a\nb"}]


def test_the_chat_template_gets_its_variables():
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"documents": [{"text": "d"}], "reasoning_effort": "low", "tools": tools, "add_generation_prompt": False}
    further = {"enable_thinking": False}
    call = chat_call.read({**CHAT, **named, "tool_choice": "none", "chat_template_kwargs": further})

    assert call.arguments["chat_template_kwargs"] == further | named


@each(
    ("body", "said"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "a", **CHAT}, "either prompt or messages"),
        ({"prompt": 3}, "prompt is a number, but must be a string"),
        ({"prompt": "a", "chat_template": "x"}, "the model's own"),
        ({"prompt": "a", "add_special_tokens": 1}, "true or false"),
    ],
)
def test_what_cannot_be_cut_into_tokens(body, said):
    with pytest.raises(ApiError, match=said):
        token_call.read_tokenize(body)


@each("tokens", [None, 3, "x", [1.5], [True], [[1]]])
def test_what_are_no_tokens(tokens):
    with pytest.raises(ApiError, match="tokens"):
        token_call.read_detokenize({"tokens": tokens})


@each("name", ["previous_response_id", "conversation"])
def test_responses_are_not_stored(name):
    for field, value in ((name, "x"), ("store", True)):
        with pytest.raises(ApiError, match=f"{field} is not supported"):
            responses_call.read({"input": "a", field: value})


@each("asked", [3, [], [3], [{"content": "a"}], [{"role": "user", "content": [{"type": "input_image"}]}]])
def test_input_that_cannot_be_read(asked):
    with pytest.raises(ApiError, match="input"):
        responses_call.read({"input": asked})


@each(
    ("part", "message", "code"),
    [
        ({"type": "input_image"}, "is of type 'input_image'; only text is supported", "unsupported_parameter"),
        ({"type": "input_text"}, 'must be {"type": "input_text", "text": ...}', "invalid_type"),
        ("a", 'must be {"type": "input_text", "text": ...}', "invalid_type"),
    ],
)
def test_an_input_part_that_is_not_text_is_named(part, message, code):
    with pytest.raises(ApiError) as refused:
        responses_call.read({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, part]}]})
    assert f"input[0].content[1] {message}" in str(refused.value)
    assert (refused.value.param, refused.value.code) == ("input", code)


@each(("field", "value", "meant"), [("max_tokens", 8, "max_output_tokens"), ("messages", [], "input")])
def test_chat_completions_fields_get_a_hint_to_the_responses_name(field, value, meant):
    with pytest.raises(ApiError, match=f"{field} is not supported: its name is {meant} here"):
        responses_call.read({"input": "a", field: value})


def test_what_openais_clients_include_is_accepted():
    """All that their type lists; only log-probabilities change the answer."""
    asked = [*get_args(ResponseIncludable)]
    assert len(asked) > 5
    for one in asked:
        arguments = responses_call.read({"input": "a", "include": [one]}).arguments
        assert arguments.get("logprobs", -1) == (0 if one == "message.output_text.logprobs" else -1)
    assert responses_call.read({"input": "a", "include": asked, "top_logprobs": 3}).arguments["logprobs"] == 3


def test_what_a_model_thought_is_left_out_of_the_conversation():
    """Agents send it back beside the messages, with any fields."""
    item = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "x", "status": None}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    read = responses_call.read({"input": [messages[0], item, messages[1], item, messages[2]]})

    assert read.arguments["messages"] == messages


def test_an_empty_input_is_said_to_be_empty():
    with pytest.raises(ApiError, match="input is empty, but must have at least one message"):
        responses_call.read({"input": []})


def test_input_becomes_a_chat():
    parts = [{"type": "input_text", "text": "a"}]
    call = responses_call.read({"instructions": "be brief", "input": [{"role": "user", "content": parts}]})

    assert call.arguments["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
