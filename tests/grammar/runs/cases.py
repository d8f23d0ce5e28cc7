"""Grammars of every form for the combinations, and whether a text follows its grammar: by jsonschema, and by `re`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from bench.grammars.debian import suite_schemas
from bench.grammars.forms import FORMS, api_schemas
from specq.grammar import GrammarBuilder

Grammar = dict[str, Any]
NUM_OBJECTS = 25
AFTER = ":"
CHOICES = ["yes", "no", "maybe, but only if the weather is fine", "日本語", "yes, of course"]
REGEX = r"(\+[0-9]{1,3} )?[0-9]{3}-[0-9]{4}( ext\. [1-9][0-9]{0,2})?"
LARK = """start: "SELECT " column (", " column)* " FROM " NAME (" LIMIT " /[1-9][0-9]{0,2}/)?
column: "*" | NAME | "count(" NAME ")"
NAME: /[a-z]{1,8}/
"""
COLUMN = r"(\*|[a-z]{1,8}|count\([a-z]{1,8}\))"
LARK_RE = rf"SELECT {COLUMN}(, {COLUMN})* FROM [a-z]{{1,8}}( LIMIT [1-9][0-9]{{0,2}})?"
TAG_BEGIN, TAG_END = "<call={}>", "</call>"
FORM_NAMES = (*FORMS, "suite", "object", "regex", "choice", "lark", "tag", "after")


def grammar_of(form: str, number: int) -> Grammar:
    """Return the grammar number `number` of a form."""
    if form in FORMS:
        return {"json_schema": _api()[f"{form}/{number % NUM_OBJECTS}"]}
    if form == "suite":
        return {"json_schema": _suite()[number % len(_suite())]}
    if form == "tag":
        names = [number % NUM_OBJECTS, (number + 3) % NUM_OBJECTS]
        tags = [{"begin": TAG_BEGIN.format(i), "schema": _api()[f"arguments/{i}"], "end": TAG_END} for i in names]
        return {"structural_tag": {"structures": tags, "triggers": ["<call="]}, "required": True, "most": 2}
    if form == "after":
        return {"json_schema": _api()[f"list/{number % NUM_OBJECTS}"], "after": AFTER}
    others: dict[str, Grammar] = {
        "object": {"json_object": True},
        "regex": {"regex": REGEX},
        "choice": {"choice": CHOICES},
        "lark": {"lark": LARK},
    }
    return others[form]


def fault_of(grammar: Grammar, text: str) -> str:
    """Return why a text that ended by `stop` does not follow its grammar, "": it does."""
    if "structural_tag" in grammar:
        return _fault_of_tags(grammar, text)
    if "json_schema" in grammar or "json_object" in grammar:
        text = text.partition(AFTER)[2] if "after" in grammar else text
        return _fault_of_json(grammar.get("json_schema", {"type": "object"}), text)
    if "choice" in grammar:
        return "" if text in CHOICES else f"{text!r} is no choice"
    pattern = REGEX if "regex" in grammar else LARK_RE
    return "" if re.fullmatch(pattern, text) else f"{text!r} does not match"


def _fault_of_json(schema: Any, text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{text!r} is not JSON: {error}"
    errors = _validator(json.dumps(schema)).iter_errors(value)
    return next((f"{text!r}: {error.message}" for error in errors), "")


@cache
def _validator(schema: str) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for

    found = json.loads(schema)
    kind = validator_for(found, default=Draft202012Validator)
    return kind(found, format_checker=kind.FORMAT_CHECKER)


def _fault_of_tags(grammar: Grammar, text: str) -> str:
    calls = re.findall(r"\s{0,4}(<call=\d+>)(.*?)</call>", text, re.DOTALL)
    rest = re.sub(r"\s{0,4}(<call=\d+>)(.*?)</call>", "", text, flags=re.DOTALL)
    schemas = {one["begin"]: one["schema"] for one in grammar["structural_tag"]["structures"]}
    if rest or not 1 <= len(calls) <= grammar["most"] or any(begin not in schemas for begin, _ in calls):
        return f"{text!r} is not a list of calls"
    return next((fault for begin, body in calls if (fault := _fault_of_json(schemas[begin], body))), "")


@cache
def _api() -> dict[str, Any]:
    numbers = {name: i for i, (name, _) in enumerate(list(api_schemas())[:NUM_OBJECTS])}
    numbers = {name.partition("/")[2]: i for name, i in numbers.items()}
    return {f"{name.partition('/')[0]}/{numbers[name.partition('/')[2]]}": one for name, one in api_schemas()}


_taken: list[Any] = []


def _suite() -> list[Any]:
    assert _taken, "take_suite was not called"
    return _taken


def take_suite(make_builder: Callable[[], GrammarBuilder], most: int = 200) -> int:
    """Keep the schemas of Debian's suite that are built without `strict` being off; return their number."""
    from specq.grammar.building import build_matcher
    from specq.grammar.limits import GrammarLimits
    from specq.protocol import JobError
    from specq.protocol.grammars import grammar_text

    tokenizer = make_builder().tokenizer()
    for one in suite_schemas():
        if not isinstance(one.schema, dict) or one.draft not in ("draft7", "draft2020-12"):
            continue
        try:
            build_matcher(tokenizer, grammar_text({"json_schema": one.schema}), GrammarLimits())
        except JobError:
            continue
        _taken.append(one.schema)
    del _taken[: max(0, len(_taken) - most)]
    return len(_taken)
