"""What Anthropic's messages and tools become: the conversation and the tools of a chat."""

import pytest

from specq.gateway.errors import ApiError
from specq.gateway.messages_call import read_conversation, read_tools
from tests.each import each

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
