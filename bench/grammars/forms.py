"""The forms in which public APIs ask for JSON, each for every object of `parts`: 25 x 8 are 200 schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from bench.grammars.parts import OBJECTS, YES_NO, Schema, listed, one_of, text, whole

NUM_SMALL = 2  # fields of an object inside a larger one


def api_schemas() -> Iterator[tuple[str, Schema]]:
    """Yield names and schemas."""
    names = list(OBJECTS)
    for form, write in FORMS.items():
        for i, name in enumerate(names):
            yield f"{form}/{name}", write(name, names[(i + 7) % len(names)])


def _object(fields: dict[str, Schema], required: list[str] | None = None, **more: Any) -> Schema:
    required = list(fields) if required is None else required
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False} | more


def _fields(name: str, most: int = 9) -> dict[str, Schema]:
    return dict(islice(OBJECTS[name][1].items(), most))


def _arguments(name: str, _other: str) -> Schema:
    """Return the arguments of one function: strict, as `tools` has them."""
    about, fields = OBJECTS[name]
    return _object(fields, description=about)


def _optional(name: str, _other: str) -> Schema:
    """Return the same with one required field. The others may be missing or null."""
    first, *others = _fields(name)
    fields = {first: _fields(name)[first]}
    fields |= {one: {"anyOf": [_fields(name)[one], {"type": "null"}]} for one in others}
    return _object(fields, [first])


def _call(name: str, other: str) -> Schema:
    """Return one call of two functions, as `tool_choice: required` asks for it."""
    calls = [
        _object({"name": {"const": one}, "arguments": _object(_fields(one))}, description=OBJECTS[one][0])
        for one in (name, other)
    ]
    return {"anyOf": calls}


def _extraction(name: str, _other: str) -> Schema:
    """Return what a text mentions: a list of objects, and whether it is complete."""
    return _object({"items": listed(_object(_fields(name, NUM_SMALL)), 2), "is_complete": YES_NO})


def _nested(name: str, other: str) -> Schema:
    """Return an object in an object in an object."""
    inner = _object(_fields(other, NUM_SMALL))
    middle = _object({"status": one_of("ok", "failed"), "data": inner})
    return _object({"request_id": whole(0, 9_999_999), name: _object(_fields(name, NUM_SMALL)), "result": middle})


def _referenced(name: str, other: str) -> Schema:
    """Return a schema with definitions, as pydantic writes it."""
    definitions = {_title(one): _object(_fields(one, NUM_SMALL), title=_title(one)) for one in (name, other)}
    main = {"$ref": f"#/$defs/{_title(name)}"}
    more = {"anyOf": [{"$ref": f"#/$defs/{_title(other)}"}, {"type": "null"}], "default": None}
    fields = {"main": main, "others": listed(main, 1), "more": more}
    return {"$defs": definitions} | _object(fields, title=f"{_title(name)}Answer")


def _tagged(name: str, other: str) -> Schema:
    """Return a union whose members a constant tells apart, with a note."""
    members = [_object({"kind": {"const": one}} | _fields(one, NUM_SMALL + 1)) for one in (name, other)]
    return _object({"note": text(30), "value": {"anyOf": members}})


def _list(name: str, _other: str) -> Schema:
    """Return a list at the top, with at least one entry."""
    return listed(_object(_fields(name, NUM_SMALL)), 3, 1)


def _title(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


FORMS: dict[str, Callable[[str, str], Schema]] = {
    "arguments": _arguments,
    "optional": _optional,
    "call": _call,
    "extraction": _extraction,
    "nested": _nested,
    "referenced": _referenced,
    "tagged": _tagged,
    "list": _list,
}
