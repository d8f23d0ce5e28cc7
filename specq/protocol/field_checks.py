"""Checks of the scalar fields of messages. A field's annotation names type and bound, and `check_of` makes the check.

Rule: checks are made once, when a module is loaded. A field without a bound is an error at that time, so none is
forgotten. A check takes a value of the JSON header and returns the field's value. It raises OutOfBoundsError,
TypeError, ValueError or JobError for a wrong value.

MOST_LEVELS limits the nesting of JSON lists and objects from outside. Code that writes or shows them allows about 250
levels.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from specq.protocol.bounds import Bound, Items, Range, shown
from specq.protocol.params import Values
from specq.protocol.types import ModelInfo

MOST_LEVELS = 100


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
