"""The layout of each message type in its frames, and the checks of its scalar fields.

A field's annotation names type and bound. `check_of` makes the check, `layout_of` the layout.

Rule: both are made once from the dataclass, when a module is loaded. A field without a bound is an error at that time,
so none is forgotten. A check takes a value of the JSON header and returns the field's value. It raises
OutOfBoundsError, TypeError, ValueError or JobError for a wrong value.

MOST_LEVELS limits the nesting of JSON lists and objects from outside. Code that writes or shows them allows about 250
levels.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from specq.protocol.bounds import Bound, Elements, Items, Range, shown
from specq.protocol.messages.base import Message
from specq.protocol.params import Values
from specq.protocol.types import ModelInfo
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION, since_of

MOST_LEVELS = 100
MAX_ARRAY = 16 * 1024 * 1024
_KEYS = ("session_id", "job_id")


def is_too_deep(data: bytes, value: Any) -> bool:
    """Return whether JSON nests lists and objects in more than MOST_LEVELS levels. `value` was parsed from `data`."""
    if data.count(b"[") + data.count(b"{") <= MOST_LEVELS:
        return False
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner = [one for one in level if type(one) in (dict, list)]
        level = [entry for one in inner for entry in (one.values() if type(one) is dict else one)]
        if not inner:
            return False
    return True


Check = Callable[[Any], Any]


class OutOfBoundsError(ValueError):
    """A value has the wrong type or is outside its bound. The text follows the field's name."""


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{shown(value)} is not a boolean")
    return value


def _check_dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError("not a JSON object")
    return value


def _bounded(kind: type, bound: Bound) -> Check:
    """Return a check for values of a type within a bound."""
    if kind is int and isinstance(bound, Range) and bound.extra is None:
        return _whole_number(bound)

    def check(value: Any) -> Any:
        if type(value) is not kind or not bound.admits(value):
            raise OutOfBoundsError(f"is {shown(value)}, but must be {bound.allowed}")
        return value

    return check


def _whole_number(bound: Range) -> Check:
    """Return the check of an integer within limits. It must be fast, since most fields are integers."""
    low, high = bound.low, bound.high

    def check(value: Any) -> Any:
        if type(value) is int and low <= value <= high:
            return value
        raise OutOfBoundsError(f"is {shown(value)}, but must be a whole number {bound.allowed}")

    return check


def _integers(bound: Items) -> Check:
    """Return the check of a list of integers, which becomes a tuple."""
    of, most, least = typing.cast("Range", bound.of), bound.most, bound.least
    low, high = of.low, of.high

    def check(value: Any) -> Any:
        if type(value) is not list or not least <= len(value) <= most:
            raise OutOfBoundsError(f"is {shown(value)}, but must be a list of {bound.allowed}")
        for item in value:
            if type(item) is not int or not low <= item <= high:
                raise OutOfBoundsError(f"has {shown(item)}, but must be a list of {bound.allowed}")
        return tuple(value)

    return check


def _names(bound: Items) -> Check:
    """Return the check of a list of strings, which becomes a tuple."""

    def check(value: Any) -> Any:
        if type(value) is not list or any(type(item) is not str for item in value) or not bound.admits(tuple(value)):
            raise OutOfBoundsError(f"is {shown(value)}, but must be a list of {bound.allowed}")
        return tuple(value)

    return check


def _check_values(cls: type[Values]) -> Check:
    return lambda value: cls.from_dict(_check_dict(value))


def check_of(annotation: Any) -> Check:
    """Return the check of a scalar field.

    Raises TypeError for a field without a bound.
    """
    if annotation is bool:
        return _check_bool
    if annotation is ModelInfo:
        return _check_model
    if isinstance(annotation, type) and issubclass(annotation, Values):
        return _check_values(annotation)
    if typing.get_origin(annotation) is not typing.Annotated:
        raise TypeError(f"a field of type {annotation} has no bound; see specq.protocol.bounds")
    kind, bound = annotation.__origin__, annotation.__metadata__[0]
    if kind == tuple[str, ...]:
        return _names(bound)
    if kind == tuple[int, ...]:
        return _integers(bound)
    return _bounded(dict if typing.get_origin(kind) is dict else kind, bound)


_MODEL_CHECKS = {name: check_of(hint) for name, hint in typing.get_type_hints(ModelInfo, include_extras=True).items()}


def _check_model(value: Any) -> ModelInfo:
    found = {}
    for name, item in _check_dict(value).items():
        check = _MODEL_CHECKS.get(name)
        if check is None:
            raise KeyError(f"a model has no field {shown(name)}")
        try:
            found[name] = check(item)
        except OutOfBoundsError as error:
            raise ValueError(f"{name} {error}") from None
    return ModelInfo(**found)


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The layout of one array in its frame."""

    name: str
    dtype: np.dtype[Any]
    itemsize: int
    empty: np.ndarray[Any, Any]
    most_bytes: int
    is_plain: Callable[[bytes], object] | None
    bound: Elements
    version: int  # the version that added it


class Newer(NamedTuple):
    """A scalar that the oldest version lacks, or a newer field inside a scalar. `of`: the scalar in the header."""

    of: str
    value: Callable[[Any], Any]  # takes the scalar's value
    default: Any
    version: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one message type in its frames."""

    key: str | None
    checks: dict[str, Check]  # of the scalars, by name
    defaults: tuple[tuple[str, Any], ...]  # of the scalars; MISSING: without a default
    objects: frozenset[str]  # scalars with fields of their own
    required: frozenset[str]
    arrays: tuple[ArrayLayout, ...]
    num_arrays: dict[int, int]  # by version
    newer: tuple[Newer, ...]

    def version(self, scalars: Mapping[str, Any]) -> int:
        """Return the oldest version that has these scalars."""
        least = OLDEST_VERSION
        for newer in self.newer:
            if newer.of in scalars and newer.value(scalars[newer.of]) != newer.default:
                least = max(least, newer.version)
        return least


def is_array(annotation: Any) -> bool:
    """Return whether a field of a message is an array."""
    return typing.get_origin(annotation) is typing.Annotated and isinstance(annotation.__metadata__[0], str)


def _array(spec: dataclasses.Field[Any], annotation: Any) -> ArrayLayout:
    dtype_name, _, bound = annotation.__metadata__
    dtype = np.dtype(dtype_name)
    most_bytes = min(MAX_ARRAY, bound.most * dtype.itemsize)
    empty = np.frombuffer(b"", dtype)
    return ArrayLayout(spec.name, dtype, dtype.itemsize, empty, most_bytes, bound.is_plain, bound, since_of(spec))


_LAYOUTS: dict[type[Message], Layout] = {}


def layout_of(cls: type[Message]) -> Layout:
    """Return the layout of a message type in its frames."""
    found = _LAYOUTS.get(cls)
    if found is None:
        found = _LAYOUTS[cls] = _layout(cls)
    return found


def _layout(cls: type[Message]) -> Layout:
    hints = typing.get_type_hints(cls, include_extras=True)
    key, checks, defaults, arrays, newer = None, {}, [], [], list[Newer]()
    for spec in dataclasses.fields(cls):
        annotation = hints[spec.name]
        if spec.name in _KEYS:
            key = spec.name
        elif is_array(annotation):
            arrays.append(_array(spec, annotation))
        else:
            checks[spec.name] = check_of(annotation)
            factory = spec.default_factory
            defaults.append((spec.name, spec.default if factory is MISSING else factory()))
            newer += _newer(spec, annotation)
    objects = frozenset(f.name for f in dataclasses.fields(cls) if dataclasses.is_dataclass(hints[f.name]))
    required = frozenset(name for name, default in defaults if default is MISSING)
    num = {version: sum(array.version <= version for array in arrays) for version in (OLDEST_VERSION, PROTOCOL_VERSION)}
    return Layout(key, checks, tuple(defaults), objects, required, tuple(arrays), num, tuple(newer))


def _newer(spec: dataclasses.Field[Any], annotation: Any) -> list[Newer]:
    """Return the parts of a scalar that the oldest version lacks: the scalar itself, or fields inside it."""
    found = [Newer(spec.name, lambda value: value, spec.default, since_of(spec))]
    if dataclasses.is_dataclass(annotation):
        fields = dataclasses.fields(annotation)
        found += [Newer(spec.name, attrgetter(f.name), f.default, since_of(f)) for f in fields]
    return [newer for newer in found if newer.version > OLDEST_VERSION]
