"""A refused grammar is explained in the words of the request: its field, the tool, the place in the schema."""

from __future__ import annotations

import pytest

from specq.gateway import chat_call, messages_call, responses_call
from specq.gateway.errors import ApiError
from specq.gateway.tool_forms import tool_grammar
from specq.grammar.building import try_grammar
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.models import resolve_model
from specq.protocol import STRICT_ADVICE, JobError
from specq.protocol.grammars import grammar_text
from specq.text import load_tokenizer_files
from tests.each import each

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOKENIZER = build_tokenizer(load_tokenizer_files(resolve_model("tiny", "target")), 4096, (0,))
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SCHEMA = {"type": "object", "properties": {"seats": UNIQUE}}
REFERRED = {"type": "object", "properties": {"seats": {"$ref": "#/$defs/Seats"}}, "$defs": {"Seats": UNIQUE}}
PLAIN, WRONG = {"name": "now", "parameters": {}}, {"name": "book", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": one} for one in (PLAIN, WRONG)]
FLAT = [{"type": "function", **one} for one in (PLAIN, WRONG)]
ANTHROPIC = [
    {"name": one["name"], "input_schema": one["parameters"], "strict": one.get("strict", False)}
    for one in (PLAIN, WRONG)
]
REASON = 'Unimplemented keys: ["uniqueItems"], at #/properties/seats'
TEMPLATES = {"hermes": "", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "general": ""}


def refusal(call, form="hermes", template=""):
    """Return what the gateway answers where a verifier's trial refuses the grammar of this call."""
    grammar = call.arguments["grammar"]
    if call.tools.functions:
        grammar = tool_grammar(call.tools, form, template, grammar)
    with pytest.raises(JobError) as refused:
        try_grammar(TOKENIZER, grammar_text(grammar), GrammarLimits(mask_s=0.1))
    return call.refused(JobError(str(refused.value)))  # a verifier's failure has no field


def of_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


@each(
    ("read", "body", "field", "advice"),
    [
        (chat_call.read, {**CHAT, "response_format": of_schema(SCHEMA)}, "response_format", STRICT_ADVICE),
        (chat_call.read, {**CHAT, "grammar": {"json_schema": SCHEMA}}, "grammar", STRICT_ADVICE),
        (chat_call.read, {**CHAT, "guided_json": SCHEMA}, "guided_json", "; leave this out"),
        (
            chat_call.read,
            {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format",
            "; leave this out",
        ),
        (
            responses_call.read,
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "text",
            STRICT_ADVICE,
        ),
        (
            messages_call.read,
            {**CHAT, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config",
            "; leave this out",
        ),
    ],
)
def test_a_refused_schema_names_its_field_and_advises_only_what_the_field_has(read, body, field, advice):
    error = refusal(read(body))

    assert (error.status, error.param, error.message) == (400, field, f"{field}: {REASON}{advice}")


@each("form", TEMPLATES)
@each(
    ("read", "body", "place"),
    [
        (chat_call.read, {**CHAT, "tools": TOOLS}, "tools[1].function.parameters"),
        (chat_call.read, {**CHAT, "tools": TOOLS, "tool_choice": "required"}, "tools[1].function.parameters"),
        (
            chat_call.read,
            {**CHAT, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "book"}}},
            "tools[1].function.parameters",
        ),
        (responses_call.read, {"input": "a", "tools": FLAT}, "tools[1].parameters"),
        (messages_call.read, {**CHAT, "max_tokens": 9, "tools": ANTHROPIC}, "tools[1].input_schema"),
    ],
)
def test_a_refused_schema_of_a_tool_names_the_tool(form, read, body, place):
    error = refusal(read(body), form, TEMPLATES[form])

    assert (error.param, error.message) == ("tools", f"{place} (book): {REASON}{STRICT_ADVICE}")


def test_of_the_other_form_of_mistral_too():
    error = refusal(chat_call.read({**CHAT, "tools": TOOLS}), "mistral", "[TOOL_CALLS][ARGS]")

    assert error.message.startswith("tools[1].function.parameters (book): ")


@each("form", TEMPLATES)
def test_a_schema_beside_tools_is_told_from_theirs(form):
    tools = [{"type": "function", "function": PLAIN}]
    call = chat_call.read({**CHAT, "tools": tools, "response_format": of_schema(SCHEMA)})
    error = refusal(call, form, TEMPLATES[form]) if form != "mistral" else refusal(call, form)

    assert (error.param, error.message) == ("response_format", f"response_format: {REASON}{STRICT_ADVICE}")


def test_the_place_is_that_of_the_definition_that_a_schema_refers_to():
    error = refusal(chat_call.read({**CHAT, "guided_json": REFERRED}))

    assert error.message.endswith(", at #/$defs/Seats; leave this out")


def test_other_reasons_name_the_field_too():
    call = chat_call.read({**CHAT, "tools": TOOLS})
    slow = call.refused(JobError("grammar: its trial took more than 2 s"))
    large = call.refused(JobError("grammar has 70000 characters as JSON, but must have at most 65536", field="grammar"))
    other = call.refused(JobError("temperature is 1000.0", field="temperature"))

    assert (slow.param, slow.message) == ("tools", "tools: its trial took more than 2 s")
    assert (large.param, large.message.partition(" characters")[0]) == ("tools", "tools: its grammar has 70000")
    assert (other.param, other.message) == ("temperature", "temperature is 1000.0")


@each(
    ("read", "body", "message"),
    [
        (
            chat_call.read,
            {**CHAT, "tools": [{"type": "function", "function": {**PLAIN, "parameter": {}}}]},
            "tools[0].function has an unknown part 'parameter'; did you mean 'parameters'",
        ),
        (chat_call.read, {**CHAT, "tools": [{**TOOLS[0], "strikt": True}]}, "tools[0] has an unknown part 'strikt'"),
        (
            chat_call.read,
            {**CHAT, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now", "nam": 1}}},
            "tool_choice.function has an unknown part 'nam'",
        ),
        (
            responses_call.read,
            {"input": "a", "tools": [{**FLAT[0], "parameter": {}}]},
            "tools[0] has an unknown part 'parameter'; did you mean 'parameters'",
        ),
        (
            messages_call.read,
            {**CHAT, "max_tokens": 9, "tools": [{**ANTHROPIC[0], "descripton": "a"}]},
            "tools[0] has an unknown part 'descripton'; did you mean 'description'",
        ),
    ],
)
def test_a_misspelt_name_within_a_tool_is_refused(read, body, message):
    with pytest.raises(ApiError) as refused:
        read(body)
    assert refused.value.message.startswith(message)
    assert (refused.value.status, refused.value.code) == (400, "unknown_parameter")


def test_names_that_clients_send_within_a_tool_are_taken():
    """Those of transformers' `get_json_schema`, of OpenAI's client and of Anthropic's."""
    more = {"return": {"type": "string"}, "output_schema": {}, "defer_loading": False, "allowed_callers": ["direct"]}
    marked = {"cache_control": {"type": "ephemeral"}, "input_examples": [], "eager_input_streaming": True}
    chat = chat_call.read({**CHAT, "tools": [{"type": "function", "function": {**WRONG, **more}}]})
    flat = responses_call.read({"input": "a", "tools": [{**FLAT[1], **more}]})
    asked = messages_call.read({**CHAT, "max_tokens": 9, "tools": [{**ANTHROPIC[1], "type": "custom", **marked}]})

    assert [call.tools.functions[0].name for call in (chat, flat, asked)] == ["book"] * 3
