"""Tools of a request: which form their calls have, the grammar that enforces it, and what the template receives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specq.gateway import chat_call, responses_call
from specq.gateway.answer_form import tool_arguments
from specq.gateway.errors import ApiError
from specq.gateway.parts import PartsForm, split
from specq.gateway.tool_fields import Function, ToolUse, read_flat_tool_use, read_tool_use
from specq.gateway.tool_forms import DEFINITION, MOST_CALLS, choose_form, tool_grammar
from specq.grammar import limits_of
from specq.grammar.building import build_matcher
from specq.grammar.tokenizer import build_tokenizer
from specq.protocol import JobError, grammar_text
from specq.testing.tokenizer import tokenizer_files, tokenizer_json
from specq.text import TextCodec, num_tokens
from tests.each import each

TEMPLATES = {path.stem: path.read_text() for path in Path("tests/text/templates").glob("*.jinja")}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "$defs": {"City": {"type": "string", "enum": ["Oslo", "Rome"]}},
}


def tool(name, parameters=None, **more):
    return {
        "type": "function",
        "function": {"name": name, **({"parameters": parameters} if parameters else {}), **more},
    }


TOOLS = [tool("weather", CITY, description="The weather."), tool("now")]
ARGS_TEMPLATE = "{{ tools }}[TOOL_CALLS]name[ARGS]"
FORMS = {  # name -> template, one call, two calls
    "hermes": (
        TEMPLATES["qwen25"],
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
        "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in (("now", "{}"), ("weather", '{"city": "Rome"}'))
        ),
    ),
    "llama3_json": (TEMPLATES["llama31"], '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}', ""),
    "mistral": (
        TEMPLATES["mistral_v3"],
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]',
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "Rome"}}]',
    ),
    "mistral args": (
        ARGS_TEMPLATE,
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}',
        '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    ),
}
TOKENIZER = build_tokenizer(tokenizer_files(), num_tokens(tokenizer_json()), (2,))


def matches(use, name, *texts, answer=None):
    """Return for each text whether the grammar of an answer allows all of it."""
    template = FORMS[name][0]
    grammar = grammar_text(tool_grammar(use, name.split()[0], template, answer))
    matcher = build_matcher(TOKENIZER, grammar, limits_of(0.1, 1 << 26))
    found = []
    for text in texts:
        one, ids = matcher.deep_copy(), TOKENIZER.ids(text)
        found.append(one.try_consume_tokens(ids) == len(ids) and one.is_accepting())
    return found


@each(
    ("name", "form"),
    [
        *((name, "hermes") for name in ("hermes", "qwen25", "qwen3")),
        ("llama31", "llama3_json"),
        ("mistral_v3", "mistral"),
        *(
            (name, "general")
            for name in ("smollm2", "chatml", "gemma3", "qwen3_coder", "gpt_oss", "granite", "llama32")
        ),
    ],
)
def test_a_template_has_a_form(name, form):
    assert choose_form(TEMPLATES[name]) == form


@each("name", FORMS)
def test_required_calls_are_calls_only(name):
    _, one, two = FORMS[name]
    use = read_tool_use({"tools": TOOLS, "tool_choice": "required"})
    named = read_tool_use({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}})
    alone = read_tool_use({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    wrong = [one.replace("Oslo", "Paris"), one.replace("weather", "other"), one[:-3], "Hi", f"Hi {one}", f"{one} Hi"]

    assert matches(use, name, one, *wrong) == [True, *[False] * len(wrong)]
    assert matches(named, name, one) == [False]
    assert [alone.is_parallel, named.is_parallel] == [False, False]
    if two:
        assert matches(use, name, two) == [True]
        assert matches(alone, name, one, two) == [True, False]
        answer = split(PartsForm(name.split()[0], frozenset({"weather", "now"})), two)
        assert [(call.name, call.arguments) for call in answer.calls] == [
            ("now", "{}"),
            ("weather", '{"city": "Rome"}'),
        ]


@each("name", FORMS)
def test_a_call_that_may_be_is_enforced_once_it_has_begun(name):
    _, one, two = FORMS[name]
    use = read_tool_use({"tools": TOOLS})
    begun = one[: one.index("Oslo")]

    assert matches(use, name, "Hi", "", f"Hi {one}", one) == [True] * 4
    assert matches(use, name, f"{begun}Paris", f"Hi {begun}Paris") == [False] * 2
    assert not two or matches(use, name, two) == [True]


@each("name", FORMS)
def test_an_answer_without_calls_may_have_a_schema(name):
    """Where a call is required there is no such answer."""
    _, one, _ = FORMS[name]
    answer = {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    free, required = (read_tool_use({"tools": TOOLS, "tool_choice": choice}) for choice in ("auto", "required"))

    assert matches(free, name, one, '{"n": 1}', "Hi", f"Hi {one}", answer=answer) == [True, True, False, False]
    assert matches(free, name, one, '{"x": 1}', "Hi", answer={"json_object": True}) == [True, True, False]
    assert matches(required, name, one, '{"n": 1}', answer=answer) == [True, False]
    with pytest.raises(JobError, match="otherwise without required"):
        grammar_text(tool_grammar(free, "hermes", "") | {"otherwise": {}})


def test_a_form_of_llama_with_its_tag():
    """Other JSON stays an answer; the tag begins a call."""
    use = read_tool_use({"tools": TOOLS})
    call = '{"name": "now", "parameters": {}}'
    grammar = tool_grammar(use, "llama3_json", "<|python_tag|>")
    matcher = build_matcher(TOKENIZER, grammar_text(grammar), limits_of(0.1, 1 << 26))
    texts = {f"<|python_tag|>{call}": True, "<|python_tag|>now()": False, '{"name": "Bob"}': True, call: True}

    for text, is_allowed in texts.items():
        one, ids = matcher.deep_copy(), TOKENIZER.ids(text)
        assert (text, one.try_consume_tokens(ids) == len(ids)) == (text, is_allowed)


def test_schemas_of_arguments():
    """No parameters mean no arguments; properties that are not named are refused unless the schema allows them."""
    free = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}}
    tools = [tool("now"), tool("add", {"properties": {"a": {"type": "integer"}}}, strict=True), tool("free", free)]
    use = read_tool_use({"tools": tools, "tool_choice": "required"})
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    structures = tool_grammar(use, "hermes", "")["structural_tag"]["structures"]
    allowed = [("now", "{}"), ("add", '{"a": 1}'), ("add", "{}"), ("free", '{"a": 1, "b": 2}')]
    refused = [("now", '{"a": 1}'), ("add", '{"a": 1, "b": 2}'), ("add", '{"b": 2}')]

    assert matches(use, "hermes", *(call.format(*one) for one in allowed + refused)) == [True] * 4 + [False] * 3
    assert [one["strict"] for one in structures] == [False, True, False]
    assert tool_grammar(use, "hermes", "")["most"] == MOST_CALLS


# --- fields -----------------------------------------------------------------------------------------------------------

WRONG = [
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type is 'web_search'"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\].function is missing"),
    ({"tools": [tool("a b")]}, r"tools\[0\].function.name is 'a b'"),
    ({"tools": [tool("f"), tool("f")]}, r"tools\[1\] has the name 'f', which another tool has"),
    ({"tools": [tool("f", {"type": "array"})]}, r"tools\[0\].function.parameters must be the schema of an object"),
    ({"tools": [tool("f", strict=1)]}, r"tools\[0\].function.strict is a number"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "129 tools"),
    ({"tools": TOOLS, "tool_choice": "now"}, "tool_choice is 'now', but must be one of auto"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f', which is not among tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type is 'allowed_tools'"),
    ({"tool_choice": "required"}, "tool_choice is given without tools"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls is a string"),
    ({"tools": TOOLS, "tool_call_parser": "xml"}, "tool_call_parser is 'xml', but must be one of hermes"),
    ({"tools": TOOLS, "guided_choice": ["a"]}, "guided_choice is not supported together with tools"),
    ({"functions": [{}]}, "functions is not supported: its newer name is tools"),
]


@each(("fields", "reason"), WRONG)
def test_wrong_tools_are_named(fields, reason):
    with pytest.raises(ApiError, match=reason) as raised:
        chat_call.read({**CHAT, **fields})

    assert raised.value.status == 400
    assert reason.startswith("'f'") or raised.value.param in fields


def test_tools_of_responses_are_those_of_chats():
    flat = [{"type": "function", **one["function"]} for one in TOOLS]
    for choice, own in (
        ("auto", "auto"),
        ({"type": "function", "function": {"name": "now"}}, {"type": "function", "name": "now"}),
    ):
        chat = chat_call.read({**CHAT, "tools": TOOLS, "tool_choice": choice})
        call = responses_call.read({"input": "Hi", "tools": flat, "tool_choice": own})

        assert call.tools == chat.tools
        assert call.arguments["chat_template_kwargs"]["tools"] == TOOLS
        assert (call.repeated["tools"], call.repeated["tool_choice"]) == (flat, own)
    with pytest.raises(ApiError, match=r"tools\[0\].type is 'file_search'"):
        responses_call.read({"input": "Hi", "tools": [{"type": "file_search"}]})


def test_without_a_choice_of_calls_nothing_is_enforced():
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
        call = chat_call.read({**CHAT, **fields})
        assert call.tools.functions == ()


# --- what the template receives ---------------------------------------------------------------------------------------

TURNS = [
    {"role": "user", "content": "Where is it warm?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_abc-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "call_abc-2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_abc-1", "content": "cold"},
    {"role": "tool", "tool_call_id": "call_abc-2", "content": "noon"},
    {"role": "user", "content": "And?"},
]


def codec(template):
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    return TextCodec({"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config)})


def prompt(template, messages, form="", **fields):
    """Return the prompt of a chat with tools."""
    own, use = codec(template), read_tool_use({"tools": TOOLS, **fields})
    arguments = {"messages": messages, "chat_template_kwargs": {"tools": TOOLS}}
    given = tool_arguments(arguments, use, form or choose_form(template), own, template)
    return own.render_chat(given["messages"], **given["chat_template_kwargs"])


def test_a_template_without_tools_shows_them_as_text():
    text = prompt(TEMPLATES["chatml"], TURNS)
    system, user, assistant, results, _ = (turn.strip() for turn in text.split("<|im_start|>")[1:])

    assert json.loads(system.split("<tools>\n")[1].split("\n")[0]) == TOOLS[0]
    assert user == "user\nWhere is it warm?<|im_end|>"
    assert assistant.splitlines()[1:3] == ["<tool_call>", '{"name": "weather", "arguments": {"city": "Oslo"}}']
    assert '{"name": "now", "arguments": {}}\n</tool_call><|im_end|>' in assistant
    assert results.splitlines()[1:] == [
        *("<tool_response>", "cold", "</tool_response>", "<tool_response>", "noon", "</tool_response>"),
        "And?<|im_end|>",
    ]


def test_the_explanation_is_the_systems_or_the_users():
    """As part of the system's message that is there; gemma has none, so the user gives it."""
    with_system = prompt(TEMPLATES["chatml"], [{"role": "system", "content": "Be brief."}, *TURNS])
    gemma = prompt(TEMPLATES["gemma2"], TURNS)

    assert with_system.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert with_system.count("<|im_start|>system") == 1
    assert gemma.index("You can call functions") < gemma.index("Where is it warm?")
    assert "You can call functions" not in prompt(TEMPLATES["chatml"], TURNS, tool_choice="none")
    assert "<tool_response>" in prompt(TEMPLATES["chatml"], TURNS, tool_choice="none")


def test_templates_with_tools_receive_them_as_they_are():
    own = codec(TEMPLATES["qwen25"])
    mistral = prompt(TEMPLATES["mistral_v3"], TURNS[:4])

    assert prompt(TEMPLATES["qwen25"], TURNS) == own.render_chat(TURNS, tools=TOOLS)
    assert '"id": "llabcabc1"' not in mistral
    assert '"id": "callabc1"' not in mistral
    assert '"id": "0callabc1"' in mistral
    assert '"call_id": "0callabc2"' in mistral
    assert "You can call functions" in prompt(TEMPLATES["qwen25"], TURNS, form="general")


def test_a_value_that_resembles_a_reference_stays():
    value = {"$ref": "#abc"}
    properties = {"x": {"const": value}, "y": {"enum": [value]}, "const": {"$ref": "#/$defs/z"}}
    schema = {"type": "object", "properties": properties, "$defs": {"z": {"type": "null"}}}
    grammar = tool_grammar(ToolUse((), (Function("f", schema),), is_required=True), "mistral", "")
    (structure,) = grammar["structural_tag"]["structures"]
    found = structure["schema"]["$defs"][f"{DEFINITION}0"]["properties"]
    assert found == {"x": {"const": value}, "y": {"enum": [value]}, "const": {"$ref": f"#/$defs/{DEFINITION}0/$defs/z"}}


@pytest.mark.parametrize(
    ("function", "choice", "flat", "message"),
    [
        ({"name": "é"}, "auto", "tools[0].name is 'é', but", "tools[0].function.name is 'é', but"),
        ({"name": "f", "parameters": []}, "auto", "tools[0].input_schema is a list", "tools[0].function.parameters is"),
        ({"name": "f"}, "tools[0].function.x", "tool_choice is 'tools[0].function.x'", "tool_choice is 'tools[0].f"),
    ],
)
def test_errors_name_a_field_as_the_endpoint_has_it(function, choice, flat, message):
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    with pytest.raises(ApiError, match=re.escape(message)):
        read_tool_use(fields)
    with pytest.raises(ApiError, match=re.escape(flat)) as caught:
        read_flat_tool_use(fields, "input_schema")
    assert (caught.value.status, caught.value.param) == (400, flat.split("[")[0].split()[0])
