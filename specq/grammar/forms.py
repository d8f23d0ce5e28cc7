"""The grammars of jobs as grammars of llguidance, in its form of Lark.

JSON is written with one space behind `:` and `,`, and without any other space. So a schema's text has one form, its
names are forced tokens, and no text can go on with spaces for ever. `x-guidance` in a schema changes this, as
llguidance documents.

Special tokens of the tokenizer may stand in fixed texts, in their spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from specq.grammar.place import Schema, all_parts_of
from specq.protocol import JobError

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FREE = r"/(?s:.*)/"  # any text
GAP = r"/[ \t\r\n]{0,4}/"  # what JSON takes as white space
ANNOTATIONS = (  # values of `format` that say what a value is for, in OpenAPI and pydantic, and no validator checks
    *("password", "binary", "byte", "base64", "base64url", "char", "html", "commonmark"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal"),
    *("path", "file-path", "directory-path", "json-string", "phone"),
)
MOST_GBNF = 4_096  # characters; their translation holds the GIL, for up to 20 ms
_IN_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:))", re.MULTILINE)
_REGEX_SIGNS = frozenset(r"\.+*?()|[]{}^$#&-~")

Special = Mapping[str, int]  # the ids of special tokens by their spelling


def llguidance_grammar(grammar: str, special: Special) -> str:
    """Return the text of llguidance's grammar for a checked one (`specq.protocol.grammars`)."""
    found: dict[str, Any] = json.loads(grammar)
    kind, value = next(iter(found.items()))
    if kind == "lark":
        inner = _lark(value)
    elif kind == "structural_tag":
        inner = _structural_tag(found, special)
    elif kind == "any":
        inner = f"start: {_any_text(found, special)}"
    else:
        inner = "start: " + _rule(kind, value, is_strict=found.get("strict", True))
    return _behind(found, inner, special) if "after" in found else inner


def _lark(text: str) -> str:
    """Return a grammar in Lark. One in GBNF, the form of llama.cpp, is translated. Raises JobError if that fails."""
    if "::=" not in text or _IN_LARK.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MOST_GBNF:
        reason = f"{len(text)} characters of GBNF, but at most {MOST_GBNF} are translated; give it in Lark"
        raise JobError(f"grammar: it has {reason}", field="grammar")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - the translation has no type of its own for all that may be wrong
        raise JobError(f"grammar: its GBNF cannot be translated: {error}", field="grammar") from None


def _behind(found: Mapping[str, Any], inner: str, special: Special) -> str:
    """Return a grammar that begins behind the first occurrence of a text. The text before it is free."""
    first, lines = _before(found, special)
    first += "" if "any" in found else f" {GAP}"
    if "opens" in found:
        first = f"( {_text(found['opens'], special)} {first} )?"
    outer = "\n".join([f"start: {first} @inner", *lines])
    parts = {"name": "outer", "lark_grammar": outer}, {"name": "inner", "lark_grammar": inner}
    return json.dumps({"grammars": parts})


def _before(found: Mapping[str, Any], special: Special) -> tuple[str, list[str]]:
    """Return what comes before a grammar as a part of a Lark rule, and the rules that it needs."""
    first, text = _first(found["after"], special), _text(found["after"], special)
    if "within" not in found and first in special:  # which the text before it does not spell either
        return f"THOUGHTS {text}", [f"THOUGHTS: {FREE} & ~/(?s:.*){_quoted(first)}(?s:.*)/"]
    if "within" not in found:
        return _up_to_text(found["after"], "thoughts", special)
    for name in ("after", "opens"):
        if name in found and _first(found[name], special) not in special:
            reason = f"within needs {name} to begin with a special token of the model, but it is {found[name]!r}"
            raise JobError(f"grammar: {reason}", field="grammar")
    return f"{_up_to(found['within'], f'<[^{special[first]}]>')} {text}", []


def _any_text(found: Mapping[str, Any], special: Special) -> str:
    """Return any text. Where a part before it is counted, it does not begin that part later."""
    opens = _first(found["opens"], special) if "within" in found and "opens" in found else ""
    return f"<[^{special[opens]}]>*" if opens in special else "<[*]>*"


def _up_to_text(text: str, name: str, special: Special) -> tuple[str, list[str]]:
    """Return a part of a Lark rule for free text up to the end of a fixed text, and the rules that it needs."""
    first, *rest = _parts(text, special)
    if first in special:
        return f"{FREE} {_text(text, special)}", []
    return f"{name} {_text(''.join(rest), special)}", [f"{name}[lazy]: /(?s:.*){_quoted(first)}/"]


def _first(text: str, special: Special) -> str:
    """Return the special token with which a fixed text begins, or else its first text."""
    return _parts(text, special)[0]


def _parts(text: str, special: Special) -> list[str]:
    """Split a fixed text into special tokens and the texts between them."""
    if not special:
        return [text]
    longest_first = sorted(special, key=len, reverse=True)
    return [part for part in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if part]


def _rule(kind: str, value: Any, *, is_strict: bool) -> str:
    """Return a grammar as a part of a Lark rule."""
    if kind == "json_object":
        return _schema({"type": "object"}, is_strict=True)
    if kind == "json_schema":
        return _schema(value, is_strict=is_strict)
    if kind == "regex":
        return f"/{_escaped(value)}/"
    return "( " + " | ".join(map(_literal, value)) + " )"


def _schema(schema: Schema, *, is_strict: bool) -> str:
    _drop_annotations(schema)
    own = schema.get("x-guidance")
    options = JSON_OPTIONS | ({} if is_strict else {"lenient": True}) | (own if isinstance(own, dict) else {})
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _drop_annotations(schema: Schema) -> None:
    """Remove the formats that constrain nothing from a schema, which changes it."""
    for _, part in all_parts_of(schema):
        if part.get("format") in ANNOTATIONS:
            del part["format"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _escaped(regex: str) -> str:
    """Return a regular expression without slashes and line ends, as it may stand between two slashes.

    Raises JobError for one that ends with half an escape.
    """
    found, is_escape = [], False
    for character in regex:
        plain = {"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(character, character)
        found.append(plain if not is_escape or plain == character else plain[1:])
        is_escape = character == "\\" and not is_escape
    if is_escape:
        raise JobError("grammar: invalid regex: it ends with a \\ that escapes nothing", field="grammar")
    return "".join(found)


def _quoted(text: str) -> str:
    """Return a text as a part of a regular expression between two slashes."""
    return _escaped("".join(f"\\{one}" if one in _REGEX_SIGNS else one for one in text))


def _text(text: str, special: Special) -> str:
    """Return a fixed text, which may be empty, as a part of a Lark rule."""
    parts = _parts(text, special) if text else []
    return " ".join(f"<[{special[part]}]>" if part in special else _literal(part) for part in parts)


def _structural_tag(found: Mapping[str, Any], special: Special) -> str:
    """Return free text in which a trigger begins one of the structures; if required, structures without free text.

    Each trigger has one rule: free text up to the trigger, then one of its structures. At the end, free text.
    """
    value, is_required, most = found["structural_tag"], found.get("required", False), found.get("most", 0)
    lines, names = [], []
    for at, trigger in enumerate(value["triggers"]):
        own = [one for one in value["structures"] if _trigger_of(one, value["triggers"]) == trigger]
        if not own:
            continue
        names.append(f"tag_{at}")
        bodies = " | ".join(_body(one, trigger, special, is_strict=found.get("strict", True)) for one in own)
        begin, own_lines = (_text(trigger, special), []) if is_required else _up_to_text(trigger, f"free_{at}", special)
        lines += [f"tag_{at}: {begin} ( {bodies} )", *own_lines]
    start = _repeated("( " + " | ".join(names) + " )", most, is_required=is_required)
    if "otherwise" in found:
        start += " | " + _schema(found["otherwise"], is_strict=found.get("strict", True))
    return "\n".join([start, *lines])


def _repeated(tag: str, most: int, *, is_required: bool) -> str:
    """Return the rule of a text with up to `most` tags, or any number if that is 0."""
    if is_required:
        following = f"( {GAP} {tag} )"
        return f"start: {tag} {following}*" if not most else f"start: {tag} {_up_to(most - 1, following)}"
    return f"start: {tag}* {FREE}" if not most else f"start: {_up_to(most - 1, tag)} {FREE} | {tag}{{{most}}}"


def _up_to(most: int, tag: str) -> str:
    return f"{tag}{{0,{most}}}" if most else ""


def _body(structure: Mapping[str, Any], trigger: str, special: Special, *, is_strict: bool) -> str:
    """Return a structure behind its trigger as a part of a Lark rule."""
    begin, end = _text(structure["begin"][len(trigger) :], special), _text(structure["end"], special)
    is_strict = structure.get("strict", is_strict)
    return f"{begin} {_schema(structure['schema'], is_strict=is_strict)} {end}".strip()


def _trigger_of(structure: Mapping[str, Any], triggers: list[str]) -> str:
    """Return the longest trigger with which a structure begins."""
    return max((trigger for trigger in triggers if structure["begin"].startswith(trigger)), key=len)
