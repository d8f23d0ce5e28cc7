"""What llguidance takes in a strict JSON schema and does not keep. Such a schema is refused, with the place.

Without these checks a text could end by `stop` and violate its schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specq.grammar.place import Schema, all_parts_of, schemas_of
from specq.protocol import JobError

_LEAST, _MOST = -(2**63), 2**63 - 1
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def check_enforced(found: Mapping[str, Any]) -> None:
    """Raise JobError for a grammar (as an object) with a strict schema that would not be kept."""
    for name, schema, is_strict in schemas_of(found):
        for place, part in all_parts_of(schema) if is_strict else ():
            for reason in filter(None, (check(part) for check in _CHECKS)):
                raise JobError(f"grammar: {reason}, at {name}{place}", field="grammar")


def _wrong_bound(schema: Schema) -> str:
    """Bounds are rounded to 53 bits, and those of integers cut to 64."""
    for names, is_wrong in ((_LOWER, int.__lt__), (_UPPER, int.__gt__)):
        for name in names:
            for value in _numbers(schema, (name,)):
                kept = min(max(int(float(value)), _LEAST), _MOST)
                if abs(value) > 2**53 and is_wrong(kept, int(value)):
                    return f"{name} {value} cannot be enforced: numbers above 2**53 are rounded"
    return ""


def _open_bound(schema: Schema) -> str:
    """Whole numbers count as included where the other bound is less than 1 farther from 0."""
    for name, others, sign in ((_LOWER[1], _UPPER, 1), (_UPPER[1], _LOWER, -1)):
        for value in _numbers(schema, (name,)):
            distances = [sign * (other - value) for other in _numbers(schema, others)]
            if value == int(value) and sign * value >= 0 and any(0 < distance < 1 for distance in distances):
                return f"{name} {value} cannot be enforced beside the other bound, which is less than 1 away"
    return ""


def _numbers(schema: Schema, names: tuple[str, ...]) -> list[float]:
    return [schema[name] for name in names if type(schema.get(name)) in (int, float)]


def _wrong_constant(schema: Schema) -> str:
    """Whole numbers of more than 53 bits are rounded."""
    values = [schema.get("const"), schema.get("enum")]
    while values:
        value = values.pop()
        if isinstance(value, list | dict):
            values += value.values() if isinstance(value, dict) else value
        elif type(value) is int and (float(value) != value or not _LEAST <= value <= _MOST):
            return f"{value} in const or enum cannot be enforced: numbers above 2**53 are rounded"
    return ""


def _repeated_names(schema: Schema) -> str:
    """Properties are counted, and a name may come twice."""
    required = schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    least = max(_numbers(schema, ("minProperties",)), default=0)
    if least > max(1, num_required):
        return f"minProperties {least} cannot be enforced: a name may be repeated; name the properties in required"
    return ""


def _two_forms_of_lists(schema: Schema) -> str:
    """Beside the older form prefixItems is ignored."""
    if "prefixItems" in schema and "additionalItems" in schema:
        return "prefixItems cannot be enforced beside additionalItems; its name there is items"
    return ""


_CHECKS: tuple[Callable[[Schema], str], ...] = (
    _wrong_bound,
    _open_bound,
    _wrong_constant,
    _repeated_names,
    _two_forms_of_lists,
)
