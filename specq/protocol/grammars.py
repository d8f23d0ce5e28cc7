"""Grammars of jobs: their kinds, and their form as a parameter. `specq.grammar` builds them.

A grammar is a JSON object with one key that names its kind:

- json_object: true, or {}: any JSON object.
- json_schema: a JSON schema, as an object. `"strict": false` beside it ignores the keywords that cannot be enforced.
  Otherwise such a schema is refused.
- regex: a regular expression that matches the whole text.
- choice: a list of texts. The text is one of them.
- lark: a grammar in llguidance's form of Lark. Short ones may be in GBNF, the form of llama.cpp, with the rule `root`.
- structural_tag: {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}. Free text, in which each trigger
  begins one of the structures. A structure may have its own `strict`. `"required": true` beside it asks for one or more
  structures and nothing else, and `"most": n` allows at most n. `"otherwise": {schema}` beside `required` also allows
  a text that follows this schema, without structures.
- any: true. Any text, for the options below.

`"after": text` beside the kind lets the grammar begin behind the first occurrence of this text. The text before it is
free. Models that think end their thoughts with such a text. With `"opens": text` too, only a text that begins with this
one has a part before the grammar. With `"within": n` that part has at most n tokens. Each text must then be a special
token of the model, or begin with one.

A fixed text may contain special tokens of the tokenizer, in their spelling.

Jobs carry a grammar as the JSON text of this object. The order of its keys is kept, since a schema's properties are
written in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from specq.protocol.bounds import MAX_GRAMMAR, shown
from specq.protocol.errors import JobError

MASK_VERSION = 1  # verifiers of the same version give the same masks for the same grammar
MAX_CHOICES = 4096
MOST_NESTED = 100  # levels of lists and objects
MOST_STRUCTURES = 256
MAX_WITHIN = 1 << 20
STRICT_ADVICE = '; leave this out, or let "strict": false ignore it'  # at the end of a reason


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_choice(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_CHOICES and all(map(_is_text, value))


def _is_structures(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() - {"structures", "triggers"}:
        return False
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        return False
    if not 0 < len(structures) <= MOST_STRUCTURES or not 0 < len(triggers) <= MOST_STRUCTURES:
        return False
    return all(map(_is_text, triggers)) and all(_is_structure(one, triggers) for one in structures)


def _is_structure(value: Any, triggers: list[str]) -> bool:
    if not isinstance(value, dict) or value.keys() - {"strict"} != {"begin", "schema", "end"}:
        return False
    if type(value.get("strict", True)) is not bool:
        return False
    begin, end = value["begin"], value["end"]
    is_triggered = isinstance(begin, str) and any(begin.startswith(trigger) for trigger in triggers)
    return is_triggered and isinstance(value["schema"], dict) and isinstance(end, str)


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "json_object": (lambda value: value is True or value == {}, "true"),
    "json_schema": (lambda value: isinstance(value, dict), "a JSON schema, as an object"),
    "regex": (_is_text, "a text that is not empty"),
    "choice": (_is_choice, f"a list of 1 to {MAX_CHOICES} texts that are not empty"),
    "lark": (_is_text, "a text that is not empty"),
    "structural_tag": (
        _is_structures,
        "an object with structures (each with begin, schema and end) and triggers, with which each begin starts",
    ),
    "any": (lambda value: value is True, "true"),
}
GRAMMAR_KINDS: tuple[str, ...] = tuple(_FORMS)
_INNER = ("json_schema", "schema")  # where OpenAI's forms have the schema
_WRAPPER = {*_INNER, "name", "description", "strict"}
_OF_SCHEMAS = {"type", "properties", "items", "enum", "anyOf", "$ref", "$schema"}
_OPTIONS: Mapping[str, tuple[tuple[str, ...], Callable[[Any], bool], str]] = {
    "strict": (("json_schema", "structural_tag"), lambda value: type(value) is bool, "true or false"),
    "required": (("structural_tag",), lambda value: type(value) is bool, "true or false"),
    "most": (("structural_tag",), lambda value: type(value) is int and 1 <= value <= 1024, "a number from 1 to 1024"),
    "otherwise": (("structural_tag",), lambda value: isinstance(value, dict), "a JSON schema, as an object"),
    "after": (GRAMMAR_KINDS, lambda value: _is_text(value) and len(value) <= 64, "a text of 1 to 64 characters"),
    "opens": (GRAMMAR_KINDS, lambda value: _is_text(value) and len(value) <= 64, "a text of 1 to 64 characters"),
    "within": (
        GRAMMAR_KINDS,
        lambda value: type(value) is int and 0 <= value <= MAX_WITHIN,
        f"a number of tokens from 0 to {MAX_WITHIN}",
    ),
}


def grammar_capability(kind: str) -> str:
    """Return the capability of a verifier that builds grammars of this kind."""
    return f"grammar/{MASK_VERSION}/{kind}"


def has_grammar_kind(capabilities: Iterable[str], kind: str) -> bool:
    """Return whether a broker that lists these capabilities passes on grammars of this kind, of any mask version."""
    return any(name.split("/")[::2] == ["grammar", kind] for name in capabilities)


def grammar_kind(grammar: str) -> str:
    """Return the kind of a checked grammar. "": no grammar."""
    return grammar[2 : grammar.index('"', 2)] if grammar else ""


def is_about_grammar(reason: str) -> bool:
    """Return whether a verifier's reason for a failure is the job's grammar. Such a reason begins with the word."""
    return reason.startswith(("grammar", "the grammar"))


def grammar_text(value: Any) -> str:
    """Return the JSON text of a grammar, with its kind as the first key. None, "" and {} mean no grammar.

    `value`: the object, or its JSON text. Raises JobError (field `grammar`) with what is wrong and what is allowed.
    """
    if value is None or value in ("", {}):
        return ""
    found = _parsed(value)
    kinds = [name for name in found if name in _FORMS]
    if len(kinds) != 1:
        given = " and ".join(kinds) or ", ".join(map(shown, list(found)[:3])) or "nothing"
        advice = '; give a JSON schema as {"json_schema": ...}' if found.keys() & _OF_SCHEMAS else ""
        raise _wrong(f"grammar has {given}, but must have exactly one of {', '.join(GRAMMAR_KINDS)}{advice}")
    (kind,) = kinds
    admits, allowed = _FORMS[kind]
    if not admits(found[kind]):
        raise _wrong(f"grammar: {kind} is {shown(found[kind])}, but must be {allowed}")
    if kind == "json_schema":
        _check_schema(found[kind])
    for name in found.keys() - {kind}:
        _check_option(kind, name, found[name])
    for name in found.keys() & {"opens", "within"}:
        if "after" not in found:
            raise _wrong(f"grammar has {name} without after, the text that ends the part before the grammar")
    if "otherwise" in found and not found.get("required"):
        raise _wrong("grammar has otherwise without required, beside which any text is allowed")
    text = _dumped({kind: found[kind]} | found)
    if len(text) > MAX_GRAMMAR:
        raise _wrong(f"grammar has {len(text)} characters as JSON, but must have at most {MAX_GRAMMAR}")
    return text


def _parsed(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        if len(value) > 6 * MAX_GRAMMAR:  # each character may be an escape of six
            raise _wrong(f"grammar has {len(value)} characters, but must have at most {MAX_GRAMMAR}")
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise _wrong(f"grammar is {shown(value)}, but must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise _wrong(f"grammar is {shown(value)}, but must be an object with one of {', '.join(GRAMMAR_KINDS)}")
    return value


def _check_schema(schema: dict[str, Any]) -> None:
    """Refuse a schema within another object, which would be a schema that allows all JSON."""
    inner = [name for name in _INNER if name in schema]
    if inner and schema.keys() <= _WRAPPER:
        raise _wrong(f"grammar: json_schema has only {', '.join(schema)}; give the value of {inner[0]} itself")


def _check_option(kind: str, name: str, value: Any) -> None:
    if name not in _OPTIONS or kind not in _OPTIONS[name][0]:
        known = ", ".join(option for option, (kinds, _, _) in _OPTIONS.items() if kind in kinds)
        raise _wrong(f"grammar has {shown(name)} beside {kind}, which may have: {known}")
    _, admits, allowed = _OPTIONS[name]
    if not admits(value):
        raise _wrong(f"grammar: {name} is {shown(value)}, but must be {allowed}")


def _dumped(found: dict[str, Any]) -> str:
    try:
        data = orjson.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:  # not JSON, a half of a surrogate pair, or too deep
        raise _wrong(f"grammar cannot be written as JSON: {error}") from None
    level: list[Any] = [found]
    for _ in range(MOST_NESTED):
        if wrong := [one for one in level if isinstance(one, float) and not math.isfinite(one)]:  # orjson writes null
            raise _wrong(f"grammar cannot be written as JSON: {wrong[0]} is not a number there")
        inner = [one for one in level if type(one) in (dict, list)]
        level = [entry for one in inner for entry in (one.values() if type(one) is dict else one)]
        if not inner:
            return data.decode()
    raise _wrong(f"grammar nests lists and objects in more than {MOST_NESTED} levels")


def _wrong(reason: str) -> JobError:
    return JobError(reason, field="grammar")
