"""The form of calls that a model writes: chosen by its chat template, and enforced by a grammar; pure.

A conversation with tools becomes what the chat template of its form takes:

general: the template knows no tools. So the system's message lists the tools and explains how to call them. Calls in
the conversation become text of the assistant, and their results become messages of the user.

mistral: ids of calls have nine letters and digits, which its templates require. Others are cut, as in vLLM.

hermes, llama3_json: the template receives tools and messages as they are.

The forms:

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write
    llama3_json  {"name": ..., "parameters": {...}}, as Llama 3 writes, perhaps behind <|python_tag|>
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}, as its template has it
    general      as hermes, for templates of any other form or without tools; the prompt explains it to the model

`call_text` reads these forms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specq.gateway.tool_fields import Function, ToolUse
from specq.protocol import JobError
from specq.text import TextCodec

Message = dict[str, Any]
_ID_LENGTH = 9
_SEEN = "seen-0"
_EXPLAINED = """You can call functions. These are their signatures:
<tools>
{tools}
</tools>
For each call write a JSON object with the name of the function and its arguments, in this form:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def general_messages(messages: Sequence[Message], tools: Sequence[Any], codec: TextCodec) -> list[Message]:
    """Return a conversation for a template without tools. Without `tools`, nothing is explained."""
    told = [_without_calls(message) for message in messages]
    joined: list[Message] = []
    is_result = False  # the last message has results
    for message in told:
        was_result, is_result = is_result, message["role"] == "tool"
        if was_result and message["role"] in ("tool", "user"):
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append({"role": "user", "content": message["content"]} if is_result else message)
    return _explained(joined, tools, codec) if tools else joined


def _without_calls(message: Message) -> Message:
    """Return a message whose calls or results are text."""
    if message["role"] in ("tool", "function"):
        return {"role": "tool", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [*([message["content"]] if message.get("content") else []), *map(_call_text, calls)]
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": "\n".join(texts)}


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    function = function if isinstance(function, dict) else {}
    name, arguments = json.dumps(function.get("name"), ensure_ascii=False), function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text.strip() or "{}"}}}\n</tool_call>'


def _explained(messages: list[Message], tools: Sequence[Any], codec: TextCodec) -> list[Message]:
    """Return a conversation that explains the tools first: to the system, or to the user if there can be no system."""
    text = _EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".lstrip()}, *messages[1:]]
    if _shows_system(codec):
        return [{"role": "system", "content": text}, *messages]
    place = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    asked = {**messages[place], "content": f"{text}\n\n{messages[place].get('content') or ''}"}
    return [*messages[:place], asked, *messages[place + 1 :]]


def _shows_system(codec: TextCodec) -> bool:
    """Return whether the template shows a system's message."""
    try:
        return _SEEN in codec.render_chat([{"role": "system", "content": _SEEN}, {"role": "user", "content": "?"}])
    except JobError:
        return False


def mistral_messages(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose ids of calls have nine letters and digits."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_with_short_id(call, "id") for call in calls]}
    return _with_short_id(message, "tool_call_id")


def _with_short_id(value: Message, name: str) -> Message:
    found = value.get(name) if isinstance(value, dict) else None
    return {**value, name: _short(found)} if isinstance(found, str) else value


def _short(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-_ID_LENGTH:].rjust(_ID_LENGTH, "0")


MOST_CALLS = 16  # in one answer
DEFINITION = "specq.schema."  # behind it the number of a function, or of what follows the functions
_KNOWS_TOOLS = re.compile(r"\btools\b")
_OPEN = frozenset(  # keywords beside which additional properties may be meant
    [
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "$dynamicRef"),
        *("allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"),
    ]
)
_VALUES = ("const", "enum", "default", "examples")  # keywords of values, not of schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
Schema = dict[str, Any]
Structures = tuple[list[Schema], list[str], int]  # the structures, their triggers, the most of them


def knows_tools(template: str) -> bool:
    """Return whether a chat template shows tools."""
    return bool(_KNOWS_TOOLS.search(template))


def choose_form(template: str) -> str:
    """Return the form of calls of a chat template."""
    if not knows_tools(template):
        return "general"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    is_llama = "<|python_tag|>" in template or "<|start_header_id|>" in template
    return "llama3_json" if is_llama and '"parameters": ' in template else "general"


def tool_grammar(use: ToolUse, form: str, template: str, answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the grammar of an answer: free text with calls, or calls only if they are required.

    answer  the grammar of an answer without calls, of the kind json_schema or json_object, if it is not free text.
    """
    most = MOST_CALLS if use.is_parallel else 1
    structures, triggers, most = _STRUCTURES[form](use.functions, template, most)
    grammar: dict[str, Any] = {"structural_tag": {"structures": structures, "triggers": triggers}, "most": most}
    if use.is_required:
        return grammar | {"required": True}
    if not answer:
        return grammar
    schema, is_strict = answer.get("json_schema", {"type": "object"}), answer.get("strict", True)
    if form == "llama3_json":  # calls are JSON too
        return {"json_schema": _one_of_calls(use.functions, "parameters", schema), "strict": is_strict}
    return grammar | {"required": True, "otherwise": schema, "strict": is_strict}


def _hermes(functions: Sequence[Function], _: str, most: int) -> Structures:
    begin, end = '<tool_call>\n{{"name": {}, "arguments": ', "}\n</tool_call>"
    return [_structure(begin.format(json.dumps(one.name)), one, end) for one in functions], ["<tool_call>"], most


def _llama(functions: Sequence[Function], template: str, _: int) -> Structures:
    """Return structures that begin with the name of a function: other JSON is an answer as any other."""
    begins = [f'{{"name": {json.dumps(one.name)}, "parameters": ' for one in functions]
    bare = [_structure(begin, one, "}") for begin, one in zip(begins, functions, strict=True)]
    tag = "<|python_tag|>"
    tagged = [{**one, "begin": tag + one["begin"]} for one in bare] if tag in template else []
    return bare + tagged, begins + ([tag] if tagged else []), 1


def _mistral(functions: Sequence[Function], template: str, most: int) -> Structures:
    trigger = "[TOOL_CALLS]"
    if "[ARGS]" in template:
        return [_structure(f"{trigger}{one.name}[ARGS]", one, "") for one in functions], [trigger], most
    begin = f"{trigger} " if f"{trigger} [" in template else trigger
    is_strict = any(function.is_strict for function in functions)
    return [{"begin": begin, "schema": _array(functions, most), "end": "", "strict": is_strict}], [trigger], 1


_STRUCTURES: Mapping[str, Callable[[Sequence[Function], str, int], Structures]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
    "general": _hermes,
}


# --- schemas ----------------------------------------------------------------------------------------------------------


def _structure(begin: str, function: Function, end: str) -> Schema:
    return {"begin": begin, "schema": arguments_schema(function), "end": end, "strict": function.is_strict}


def arguments_schema(function: Function) -> Schema:
    """Return the schema of a function's arguments.

    Like xgrammar in vLLM, it has no additional properties unless it says so.
    """
    schema = {"type": "object", "properties": {}, **function.parameters}
    return schema if schema.keys() & _OPEN else {**schema, "additionalProperties": False}


def _array(functions: Sequence[Function], most: int) -> Schema:
    """Return the schema of a list of calls."""
    items = _one_of_calls(functions, "arguments")
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most, "$defs": items.pop("$defs")}


def _one_of_calls(functions: Sequence[Function], arguments: str, *others: Any) -> Schema:
    """Return the schema of one call, or of one of `others`. Schemas of arguments are among its definitions.

    arguments  the property that a call's arguments are.
    """
    schemas = [*map(arguments_schema, functions), *others]
    places = [f"#/$defs/{DEFINITION}{place}" for place in range(len(schemas))]
    kinds: list[Schema] = [
        {
            "type": "object",
            "properties": {"name": {"const": one.name}, arguments: {"$ref": place}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for one, place in zip(functions, places, strict=False)
    ]
    kinds += [{"$ref": place} for place in places[len(functions) :]]
    defs = {
        f"{DEFINITION}{at}": _moved(schema, place)
        for at, (schema, place) in enumerate(zip(schemas, places, strict=True))
    }
    return (kinds[0] if len(kinds) == 1 else {"anyOf": kinds}) | {"$defs": defs}


def _moved(schema: Any, place: str, *, is_named: bool = False) -> Any:
    """Return a schema whose references to itself are right at another place.

    is_named  whether it is an object of schemas by their names.
    """
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if is_named:
        return {name: _moved(value, place) for name, value in schema.items()}
    moved = {
        name: value if name in _VALUES else _moved(value, place, is_named=name in _NAMED)
        for name, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
