"""The fields that constrain a text, in OpenAI's and vLLM's forms, as a grammar of the job, and why one was refused;
pure.

A refusal is in the words of the request. The client and the verifier know only the job's argument `grammar`. The
request may have asked for it in another field, or with tools. Places are those of `specq.grammar.place`: a JSON
pointer, with the name of the schema if there are several.

    response_format      OpenAI's: text, json_object, json_schema; vLLM's: structural_tag
    text                 its part `format` has the same in `/v1/responses`
    structured_outputs   vLLM's: json, regex, choice, grammar, json_object or structural_tag, and flags
    guided_*             vLLM's former names of the same, and `structural_tag`

Rules:

- A request has at most one of them, or specq's own field `grammar`. Two are refused, and both are named.
- What would change the set of valid texts is honoured or refused by name, never ignored.
- Every keyword of a schema is enforced, or the schema is refused. Only `strict: false` ignores some keywords."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specq.gateway.errors import ApiError
from specq.gateway.fields import Check, Part, is_flag, is_list, is_object, is_text, need
from specq.gateway.tool_fields import Function, ToolUse
from specq.gateway.tool_forms import DEFINITION
from specq.protocol import STRICT_ADVICE, JobError, grammar_text, is_about_grammar

_ARGUMENT = "grammar"
_SCHEMA = re.compile(  # one of several
    rf", at (?:(?:structures\[0\]\.schema)?#/\$defs/{re.escape(DEFINITION)}(\d+)"
    r"|structures\[(\d+)\]\.schema#|otherwise#)"
)


def in_words_of_request(error: JobError, chosen: FieldGrammar, tools: ToolUse) -> JobError:
    """Return an error about a job's grammar with the field of the request that it is about; any other unchanged."""
    is_unnamed = not error.field and error.code == "invalid" and is_about_grammar(str(error))
    if not is_unnamed and error.field != _ARGUMENT:
        return error
    function, reason = _function_of(str(error), tools)
    if function is not None:
        return JobError(f"{function.place} ({function.name}): {_plain(reason)}", error.code, "tools")
    if tools.functions and not chosen.field:
        return JobError(f"tools: {_plain(reason)}", error.code, "tools")
    if not chosen.may_be_loose:
        reason = reason.replace(STRICT_ADVICE, "; leave this out")
    if chosen.field not in ("", _ARGUMENT):
        reason = f"{chosen.field}: {_plain(reason)}"
    return JobError(reason, error.code, chosen.field or _ARGUMENT)


def _function_of(reason: str, tools: ToolUse) -> tuple[Function | None, str]:
    """Return the function whose schema a place is in, if any, and the reason with the place within that schema.

    The schemas of all forms of calls are in the order of the functions (`specq.gateway.tool_forms`).
    """
    found = _SCHEMA.search(reason)
    if not tools.functions or found is None:
        return None, reason
    reason = f"{reason[: found.start()]}, at #{reason[found.end() :]}"
    definition, structure = found.groups()
    if structure is not None:
        return tools.functions[int(structure) % len(tools.functions)], reason
    at = len(tools.functions) if definition is None else int(definition)
    return (tools.functions[at] if at < len(tools.functions) else None), reason


def _plain(reason: str) -> str:
    """Return a reason behind the name of a field."""
    if reason.startswith("grammar: "):
        return reason.removeprefix("grammar: ")
    return f"its {reason}" if reason.startswith("grammar ") else reason


Grammar = dict[str, Any]
Read = Callable[[Part], Grammar]


class FieldGrammar(NamedTuple):
    """The grammar of a request as the job's argument, and the field that has it. {} and "": none.

    may_be_loose  whether the field has a place for `strict`.
    """

    grammar: Any = {}  # noqa: RUF012 - never changed
    field: str = ""
    may_be_loose: bool = False


NO_GRAMMAR = FieldGrammar()


def choose_grammar(fields: Mapping[str, Any], known: Mapping[str, Read]) -> FieldGrammar:
    """Return the grammar of a request; raise ApiError that names the wrong field.

    known  the endpoint's fields of grammars: `COMPLETIONS` or `RESPONSES`.
    """
    found = {name: read(Part(name, fields[name])) for name, read in known.items() if name in fields}
    chosen = [FieldGrammar(one, name, _has_strict(name, fields)) for name, one in found.items() if one not in ({}, "")]
    if len(chosen) > 1:
        first, second = chosen[0].field, chosen[1].field
        raise ApiError(f"{first} and {second} are both given; give one of them", param=second, code="invalid_value")
    return chosen[0] if chosen else NO_GRAMMAR


def _has_strict(name: str, fields: Mapping[str, Any]) -> bool:
    value = fields[name].get("format") if name == "text" else fields[name]
    return name == "grammar" or (name in ("response_format", "text") and value["type"] == "json_schema")


def _formed(part: Part, grammar: Grammar) -> Grammar:
    """Return a grammar whose form is right; raise ApiError that names the part."""
    try:
        grammar_text(grammar)
    except JobError as error:
        raise part.wrong(f"is not a valid grammar: {str(error).removeprefix('grammar: ')}") from None
    return grammar


# --- the kinds --------------------------------------------------------------------------------------------------------


def _json(part: Part) -> Grammar:
    part = part.parsed()
    return _formed(part, {"json_schema": part.of(is_object)})


def _regex(part: Part) -> Grammar:
    return _formed(part, {"regex": part.of(is_text)})


def _choice(part: Part) -> Grammar:
    return _formed(part, {"choice": part.of(is_list)})


def _lark(part: Part) -> Grammar:
    return _formed(part, {"lark": part.of(is_text)})


def _json_object(part: Part) -> Grammar:
    return {"json_object": True} if part.of(is_flag) else {}


def _structured(part: Part) -> Grammar:
    """Return the grammar of `structured_outputs`: one kind, and flags."""
    parts = part.parts(*_STRUCTURED, *_FLAGS)
    for name, (kind, only, reason) in _FLAGS.items():
        if name in parts and parts[name].of(kind) != only and only is not None:
            raise parts[name].refused(reason)
    found = {name: grammar for name, read in _STRUCTURED.items() if name in parts and (grammar := read(parts[name]))}
    if len(found) != 1:
        given = f"{' and '.join(found)} are given" if found else "none is given"
        raise part.wrong(f"must have exactly one of {', '.join(_STRUCTURED)}, but {given}")
    return next(iter(found.values()))


# --- formats ----------------------------------------------------------------------------------------------------------


def _format(part: Part) -> Grammar:
    """Return the grammar of a `response_format`; {} for text."""
    return _FORMATS[part.among(_FORMATS)](part)


def _text(part: Part) -> Grammar:
    """Return the grammar of the field `text` of `/v1/responses`; {} for text."""
    parts = part.parts("format", "verbosity")
    if "verbosity" in parts and parts["verbosity"].value != "medium":
        raise parts["verbosity"].refused("leave it out or give 'medium'")
    if "format" not in parts:
        return {}
    wanted = parts["format"]
    return _schema_of(wanted, "type") if wanted.among(_TEXT_FORMATS) == "json_schema" else _format(wanted)


def _free(part: Part) -> Grammar:
    part.parts("type")
    return {}


def _object(part: Part) -> Grammar:
    """Return any JSON object. A `schema` beside the type, as other servers have it, is honoured."""
    parts = part.parts("type", "schema")
    return _json(parts["schema"]) if "schema" in parts else {"json_object": True}


def _schema(part: Part) -> Grammar:
    return _schema_of(need(part.parts("type", "json_schema"), "json_schema", part))


def _schema_of(part: Part, *more: str) -> Grammar:
    """Return the grammar of a schema with its name, description and `strict`."""
    parts = part.parts("name", "description", "schema", "strict", *more)
    for name in parts.keys() & {"name", "description"}:
        parts[name].of(is_text)
    is_loose = "strict" in parts and not parts["strict"].of(is_flag)
    schema = need(parts, "schema", part)
    return _formed(schema, {"json_schema": schema.of(is_object)} | ({"strict": False} if is_loose else {}))


# --- structural tags --------------------------------------------------------------------------------------------------


def _structural_tag(part: Part) -> Grammar:
    """Return the grammar of vLLM's structural tags: `structures` and `triggers`, or the newer `format`."""
    part = part.parsed()
    parts = part.parts("type", "structures", "triggers", "format")
    if "type" in parts and parts["type"].value != "structural_tag":
        raise parts["type"].wrong("must be 'structural_tag'")
    if "format" in parts:
        part.parts("type", "format")
        wanted = parts["format"]
        return _formed(wanted, _TAG_FORMATS[wanted.among(_TAG_FORMATS)](wanted))
    structures, triggers = (need(parts, name, part) for name in ("structures", "triggers"))
    found = [_structure(one) for one in structures.entries()]
    return _formed(part, {"structural_tag": {"structures": found, "triggers": triggers.of(is_list)}})


def _structure(part: Part) -> Grammar:
    parts = part.parts("begin", "schema", "end")
    begin, end = (need(parts, name, part).of(is_text) for name in ("begin", "end"))
    return {"begin": begin, "schema": parts["schema"].of(is_object) if "schema" in parts else {}, "end": end}


def _triggered_tags(part: Part) -> Grammar:
    parts = part.parts("type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
    _refuse_but(parts, stop_after_first=False, excludes=[])
    triggers, tags = (need(parts, name, part) for name in ("triggers", "tags"))
    required = {"required": True} if "at_least_one" in parts and parts["at_least_one"].of(is_flag) else {}
    return {"structural_tag": {"structures": [*map(_tag, tags.entries())], "triggers": triggers.of(is_list)}} | required


def _tag(part: Part) -> Grammar:
    parts = part.parts("type", "begin", "content", "end")
    begin, content, end = (need(parts, name, part) for name in ("begin", "content", "end"))
    content.among(("json_schema",))
    ends = end.entries() if isinstance(end.value, list) else [end]
    if len(ends) != 1:
        raise end.refused("give one end")
    return {"begin": begin.of(is_text), "schema": _content(content)["json_schema"], "end": ends[0].of(is_text)}


def _content(part: Part) -> Grammar:
    """Return the schema of a format of type json_schema. Properties come in its order, which is one of any order."""
    parts = part.parts("type", "json_schema", "style", "any_order", "max_whitespace_cnt", "excludes")
    _refuse_but(parts, style="json", max_whitespace_cnt=None, excludes=[])
    schema = need(parts, "json_schema", part)
    return {"json_schema": {} if schema.value is True else schema.of(is_object)}


def _refuse_but(parts: Mapping[str, Part], **allowed: Any) -> None:
    for name, value in allowed.items():
        if name in parts and (parts[name].value != value or type(parts[name].value) is not type(value)):
            raise parts[name].refused("leave it out")


def _const(part: Part) -> Grammar:
    return {"choice": [need(part.parts("type", "value"), "value", part).of(is_text)]}


def _pattern(part: Part) -> Grammar:
    parts = part.parts("type", "pattern", "excludes")
    _refuse_but(parts, excludes=[])
    return {"regex": need(parts, "pattern", part).of(is_text)}


def _grammar(part: Part) -> Grammar:
    return {"lark": need(part.parts("type", "grammar"), "grammar", part).of(is_text)}


_TAG_FORMATS: dict[str, Read] = {
    "triggered_tags": _triggered_tags,
    "json_schema": _content,
    "regex": _pattern,
    "grammar": _grammar,
    "const_string": _const,
}

# --- fields -----------------------------------------------------------------------------------------------------------


def _own(part: Part) -> Any:
    """Return specq's own field unchanged; the client checks it."""
    return part.value


def _whitespace(part: Part) -> Grammar:
    raise part.refused(_WHITESPACE)


_WHITESPACE = "JSON has one space behind : and , and no other"
_FORMATS: dict[str, Read] = {
    "text": _free,
    "json_object": _object,
    "json_schema": _schema,
    "structural_tag": _structural_tag,
}
_TEXT_FORMATS = ("text", "json_object", "json_schema")
_STRUCTURED: dict[str, Read] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
_FLAGS: dict[str, tuple[Check, Any, str]] = {  # name -> type, the only value if not None, reason
    "disable_any_whitespace": (is_flag, None, ""),  # so it is always
    "disable_fallback": (is_flag, None, ""),
    "disable_additional_properties": (is_flag, False, 'write "additionalProperties": false into the schema'),
    "whitespace_pattern": (is_text, "", _WHITESPACE),
}
VLLM: dict[str, Read] = {
    "structured_outputs": _structured,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
    "guided_whitespace_pattern": _whitespace,
    "structural_tag": _structural_tag,
    "grammar": _own,
}
COMPLETIONS: dict[str, Read] = {"response_format": _format, **VLLM}
RESPONSES: dict[str, Read] = {"text": _text, **VLLM}
