"""Conversations as OpenAI's clients send them back, and what templates receive of them."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Größe <b>"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
USER, THANKS = {"role": "user", "content": "Weather in Köln?"}, {"role": "user", "content": "Thanks"}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
NULLS = {"refusal": None, "annotations": None, "audio": None, "function_call": None}  # of the answer itself


def call(arguments: Any = '{"city":"Köln","days":2}', call_id: str = "abcdefghi", name: str = "weather") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Message, **fields: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def result(content: Any = "20 °C", call_id: str = "abcdefghi", **fields: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content} | fields


def said(content: Any = "It is warm.", **fields: Any) -> Message:
    return {"role": "assistant", "content": content} | fields


def text(content: str, kind: str = "text") -> Message:
    return {"type": kind, kind: content}


ARGUMENTS = {"city": "Köln", "days": 2}
CALLED = said("", tool_calls=[call(ARGUMENTS)])

# What a client sends, and what a template receives: written by hand, not computed.
NORMALISED: dict[str, tuple[Message, Message]] = {
    "a call, content null": (calling(call()), CALLED),
    "a call, content missing": (
        {"role": "assistant", "tool_calls": [call()]},
        {"role": "assistant", "tool_calls": [call(ARGUMENTS)], "content": ""},
    ),
    "a call, content empty": (calling(call(), content=""), CALLED),
    "a call, content empty parts": (calling(call(), content=[]), CALLED),
    "a call beside a text": (calling(call(), content="I look."), said("I look.", tool_calls=[call(ARGUMENTS)])),
    "the answer's own nulls": (calling(call(), **NULLS, reasoning_content=None), CALLED),
    "no calls: null": (said(tool_calls=None, **NULLS), said()),
    "no calls: an empty list": (said(tool_calls=[]), said()),
    "no parts": (said([]), said("")),
    "arguments empty": (calling(call("")), said("", tool_calls=[call({})])),
    "arguments of blanks": (calling(call(" \n")), said("", tool_calls=[call({})])),
    "arguments null": (calling(call(None)), said("", tool_calls=[call({})])),
    "arguments missing": (
        calling({"id": "1", "type": "function", "function": {"name": "f"}}),
        said("", tool_calls=[call({}, "1", "f")]),
    ),
    "arguments an object already": (calling(call(ARGUMENTS)), CALLED),
    "arguments cut off": (calling(call('{"city": "K')), said("", tool_calls=[call('{"city": "K')])),
    "arguments a list": (calling(call("[1]")), said("", tool_calls=[call("[1]")])),
    "arguments a number": (calling(call("7")), said("", tool_calls=[call("7")])),
    "arguments not JSON": (calling(call('{"a": NaN}')), said("", tool_calls=[call('{"a": NaN}')])),
    "arguments too deep": (calling(call('{"a":' * 9999)), said("", tool_calls=[call('{"a":' * 9999)])),
    "arguments with blanks and escapes": (calling(call(' {"city" : "K\\u00f6ln",\n "days": 2}')), CALLED),
    "calls without the level function": (
        calling({"name": "f", "arguments": '{"a": null}'}),
        said("", tool_calls=[{"name": "f", "arguments": {"a": None}}]),
    ),
    "a custom call": (
        calling({"id": "1", "type": "custom", "custom": {"name": "f", "input": "{}"}}),
        said("", tool_calls=[{"id": "1", "type": "custom", "custom": {"name": "f", "input": "{}"}}]),
    ),
    "a result in parts": (result([text("20"), text("°C")]), result("20\n°C")),
    "a result with a name": (result(name="weather"), result(name="weather")),
    "a user with a name": (USER | {"name": "Ann"}, USER | {"name": "Ann"}),
    "a user without a name": (USER | {"name": None}, USER),
    "refused: the refusal alone": (said(None, refusal="No."), said("No.", refusal="No.")),
    "refused: in a part": (said([text("No.", "refusal")]), said("No.")),
    "the older call": (
        said(None, function_call={"name": "f", "arguments": "{}"}),
        said("", function_call={"name": "f", "arguments": "{}"}),
    ),
    "the older result": (
        {"role": "function", "name": "f", "content": "1"},
        {"role": "function", "name": "f", "content": "1"},
    ),
    "reasoning": (said(reasoning="Hm."), {"thinking": "Hm.", **said(reasoning="Hm.", reasoning_content="Hm.")}),
    "reasoning alone": (
        said(None, reasoning_content="Hm."),
        {"thinking": "Hm.", **said("", reasoning_content="Hm.")},
    ),
    "a developer": (
        {"role": "developer", "content": [text("Be"), text("brief")]},
        {"role": "developer", "content": "Be\nbrief"},
    ),
}

PARALLEL = calling(call(), call("{}", "jklmnopqr", "now"), **NULLS)
RESULTS = [result(), result([text("noon")], "jklmnopqr")]

CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [USER],
    "system first": [SYSTEM, USER],
    "system later": [USER, said(), SYSTEM, THANKS],
    "system twice": [SYSTEM, SYSTEM, USER],
    "developer first": [{"role": "developer", "content": "Be brief."}, USER],
    "developer later": [USER, said(), {"role": "developer", "content": "Be brief."}, THANKS],
    "an answer last": [USER, said("It is")],
    "blanks around": [{"role": "user", "content": " \n a\t "}, said("\n\n b \n"), {"role": "user", "content": ""}],
    "special tokens in texts": [{"role": "user", "content": "<|im_end|><s>{{ 1 }}{% raw %}"}],
    "thinking in the text": [USER, said("<think>\nHm.\n</think>\n\nIt is warm."), THANKS],
    "reasoning and a call": [USER, calling(call(), reasoning_content="Hm."), result(), said(reasoning="So.")],
    "reasoning, a text and a call": [USER, calling(call(), content="I look.", thinking="Hm."), result()],
    "parts everywhere": [SYSTEM | {"content": [text("Be"), text("brief")]}, USER | {"content": [text("a"), text("b")]}],
    "parallel calls": [SYSTEM, USER, PARALLEL, *RESULTS],
    "parallel calls, then an answer": [USER, PARALLEL, *RESULTS, said(), THANKS],
    "results in another order": [USER, PARALLEL, *RESULTS[::-1], said()],
    "calls one after the other": [USER, calling(call()), result(), calling(call("{}", "jklmnopqr", "now")), RESULTS[1]],
    "ids as OpenAI writes them": [
        USER,
        calling(call(call_id="call_AbC0123456789")),
        result(call_id="call_AbC0123456789"),
    ],
    "results of objects": [USER, calling(call()), result('{"t": 20, "u": "°C"}')],
    "a call within a system": [SYSTEM, USER, calling(call(), content=""), result(), said(**NULLS), THANKS],
    "the older call and its result": [
        USER,
        said(None, function_call={"name": "weather", "arguments": '{"city": "K"}'}),
        {"role": "function", "name": "weather", "content": "20"},
    ],
    **{name: [USER, sent, result()] for name, (sent, _) in NORMALISED.items() if sent["role"] == "assistant"},
    **{name: [sent] for name, (sent, _) in NORMALISED.items() if sent["role"] in ("user", "developer")},
    **{name: [USER, calling(call()), sent, said()] for name, (sent, _) in NORMALISED.items() if sent["role"] == "tool"},
}
