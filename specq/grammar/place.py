"""Where in a JSON schema is what a grammar was refused for. llguidance names the keyword, and not its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MOST_TRIED = 64  # parts of a schema
_ONE = ("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")

Schema = dict[str, Any]


def place_of(schema: Schema, reason_of: Callable[[Schema], str]) -> str:
    """Return the JSON pointer of the smallest part that is refused for the same reason. "#": the whole schema.

    reason_of: why a schema is refused, or "".
    """
    common = {name: schema[name] for name in _DEFINITIONS if name in schema}
    reason, place, part = reason_of(schema), "#", schema
    num_tried = 0
    while True:
        for name, inner in parts_of(part):
            num_tried += 1
            if num_tried > MOST_TRIED:
                return place
            if reason_of({**common, **inner}) == reason:
                place, part = f"{place}/{name}", inner
                break
        else:
            return place


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
