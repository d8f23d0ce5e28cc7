"""The layout of each message type in its frames. It is made once from the dataclass. An unbounded field raises then."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from specq.protocol.bounds import Elements
from specq.protocol.field_checks import Check, check_of
from specq.protocol.messages.base import Message
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION, since_of

MAX_ARRAY = 16 * 1024 * 1024
_KEYS = ("session_id", "job_id")


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
