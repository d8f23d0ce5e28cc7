"""Arrays in PostgreSQL's binary form: the columns of a group of records. They are made faster here than by psycopg."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from psycopg import pq
from psycopg.abc import Buffer
from psycopg.adapt import Dumper


class IntArray(bytes):
    """int8[], in binary form."""

    __slots__ = ()


class FloatArray(bytes):
    """float8[], in binary form."""

    __slots__ = ()


class BytesArray(bytes):
    """bytea[], in binary form."""

    __slots__ = ()


class TextArray(bytes):
    """text[], in binary form."""

    __slots__ = ()


_INT8, _FLOAT8, _BYTEA, _TEXT = 20, 701, 17, 25  # PostgreSQL's numbers of types
_HEAD = struct.Struct(">5i")  # dimensions, has NULLs, type, length, first index
_LENGTH = struct.Struct(">i")
_SHORT = [_LENGTH.pack(length) for length in range(4096)]  # most values are short
_NUMBERS = {code: np.dtype([("length", ">i4"), ("value", code)]) for code in (">i8", ">f8")}


def ints(values: Sequence[int]) -> IntArray:
    """Return int8[]."""
    return IntArray(_numbers(_INT8, ">i8", values))


def floats(values: Sequence[float]) -> FloatArray:
    """Return float8[]."""
    return FloatArray(_numbers(_FLOAT8, ">f8", values))


def blobs(values: Sequence[bytes]) -> BytesArray:
    """Return bytea[]."""
    return BytesArray(_pieces(_BYTEA, values))


def texts(values: Sequence[str]) -> TextArray:
    r"""Return text[]. PostgreSQL's text cannot have U+0000, so that is written as `\0`, and a backslash as two."""
    return TextArray(_pieces(_TEXT, [to_text(value).encode("utf-8", "replace") for value in values]))


def to_text(value: str) -> str:
    """Return a string as it is stored."""
    return value.replace("\\", "\\\\").replace("\0", "\\0") if "\\" in value or "\0" in value else value


def from_text(value: str) -> str:
    """Return a string that was stored."""
    if "\\" not in value:
        return value
    return "\\".join([part.replace("\\0", "\0") for part in value.split("\\\\")])


def _numbers(kind: int, code: str, values: Sequence[float]) -> bytes:
    if not values:
        return _HEAD.pack(0, 0, kind, 0, 0)[:12]
    table = np.empty(len(values), _NUMBERS[code])
    table["length"], table["value"] = 8, values
    return _HEAD.pack(1, 0, kind, len(values), 1) + table.tobytes()


def _pieces(kind: int, values: Sequence[bytes]) -> bytes:
    if not values:
        return _HEAD.pack(0, 0, kind, 0, 0)[:12]
    sizes = [*map(len, values)]
    lengths = [_SHORT[size] for size in sizes] if max(sizes) < len(_SHORT) else map(_LENGTH.pack, sizes)
    pieces = chain.from_iterable(zip(lengths, values, strict=True))
    return b"".join((_HEAD.pack(1, 0, kind, len(values), 1), *pieces))


class _Packed(Dumper):
    format = pq.Format.BINARY

    def dump(self, obj: Any) -> Buffer | None:
        return bytes(obj)


class _IntArrayDumper(_Packed):
    oid = 1016


class _FloatArrayDumper(_Packed):
    oid = 1022


class _BytesArrayDumper(_Packed):
    oid = 1001


class _TextArrayDumper(_Packed):
    oid = 1009


ARRAYS: dict[type, type[Dumper]] = {
    IntArray: _IntArrayDumper,
    FloatArray: _FloatArrayDumper,
    BytesArray: _BytesArrayDumper,
    TextArray: _TextArrayDumper,
}
