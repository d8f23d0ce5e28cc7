"""Where in a grammar is what it was refused for. llguidance names the keyword, and not its place.

A place is a JSON pointer into a schema (`#/properties/a`). Of several schemas it begins with the name of one:
`structures[1].schema#/properties/a`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MOST_TRIED = 64  # parts of a schema
MOST_DIGITS = 9  # of a place in a list
_ONE = ("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")

Schema = dict[str, Any]


def schemas_of(found: Mapping[str, Any]) -> Iterator[tuple[str, Schema, bool]]:
    """Yield the schemas of a grammar (as an object): the name of each, and whether it is strict."""
    is_strict = found.get("strict", True)
    for kind, name in (("json_schema", ""), ("otherwise", "otherwise")):
        if kind in found:
            yield name, found[kind], is_strict
    for at, one in enumerate(found.get("structural_tag", {"structures": ()})["structures"]):
        yield f"structures[{at}].schema", one["schema"], one.get("strict", is_strict)


def place_of(schema: Schema, reason_of: Callable[[Schema], str]) -> str:
    """Return the JSON pointer of the smallest part that is refused for the same reason. "#": the whole schema.

    A part that refers to a definition is where that definition is.

    reason_of: why a schema is refused, or "".
    """
    common = {name: schema[name] for name in _DEFINITIONS if name in schema}
    reason, place, part = reason_of(schema), "#", schema
    num_tried = 0
    while True:
        inside = [(f"{place}/{name}", inner) for name, inner in parts_of(part)]
        for name, inner in [*inside, *_referred(part, schema)]:
            num_tried += 1
            if num_tried > MOST_TRIED:
                return place
            if reason_of({**common, **inner}) == reason:
                place, part = name, inner
                break
        else:
            return place


def _referred(part: Schema, *resources: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield what a part refers to by a JSON pointer, with its place, in each of the schemas that it may mean."""
    address = part.get("$ref")
    place = address.partition("#")[2] if isinstance(address, str) else ""
    for found in resources if place.startswith("/") else ():
        inner: Any = found
        for name in unquote(place).split("/")[1:]:
            inner = _entry(inner, name)
        if isinstance(inner, dict):
            yield f"#{place}", inner


def _entry(value: Any, name: str) -> Any:
    """Return what a name of a pointer stands for in a value, or None."""
    if isinstance(value, list):
        at = int(name) if name.isdecimal() and len(name) < MOST_DIGITS else len(value)
        return value[at] if at < len(value) else None
    return value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None


def all_parts_of(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield a schema, all parts inside it and all that they refer to, each once, with their pointers.

    Pointers inside a part with an `$id` begin there.
    """
    ahead, met = [("#", schema, schema)], set[int]()
    while ahead:
        place, part, outer = ahead.pop()
        if id(part) not in met:
            met.add(id(part))
            yield place, part
            resource = part if isinstance(part.get("$id"), str) else outer
            inside = [(f"{place}/{name}", inner, resource) for name, inner in parts_of(part)]
            ahead += [*((at, one, resource) for at, one in _referred(part, resource, schema)), *reversed(inside)]


def parts_of(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly inside a schema, with their pointers."""
    found = [(name, schema.get(name)) for name in _ONE]
    for name in _LISTS:
        entries = schema.get(name)
        found += [(f"{name}/{i}", one) for i, one in enumerate(entries)] if isinstance(entries, list) else []
    for name in _NAMED:
        named = schema.get(name)
        found += [(f"{name}/{_escaped(key)}", one) for key, one in named.items()] if isinstance(named, dict) else []
    yield from ((name, one) for name, one in found if isinstance(one, dict))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
