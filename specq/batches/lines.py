"""The lines of a batch's input file; pure.

A line is `{"custom_id": text, "method": "POST", "url": the batch's endpoint, "body": {...}}`, as at OpenAI. The first
line has number 1. Blank lines are left out, but counted.

Rule: a `LineSplitter` holds at most one line, and of a line that is too long not even that.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from specq.protocol import MOST_LEVELS, is_too_deep

MOST_LINES = 50_000  # of a batch, as at OpenAI
MOST_REASONS = 100  # lines that are named as wrong
MOST_ID = 512  # characters of a custom_id
_KEYS = ("custom_id", "method", "url", "body")


class RawLine(NamedTuple):
    """A line as bytes. `data` None: it is too long."""

    number: int
    data: bytes | None


class LineSplitter:
    """Splits the chunks of a file into lines."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._rest, self._number, self._is_long = most_bytes, b"", 0, False

    def feed(self, chunk: bytes) -> Iterator[RawLine]:
        """Yield the lines that end in this chunk, blank ones excepted."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            yield from self._line(part)
        self._keep(rest)

    def end(self) -> Iterator[RawLine]:
        """Yield the last line if no line break ends it."""
        yield from self._line(b"")

    def _keep(self, part: bytes) -> None:
        self._is_long |= len(self._rest) + len(part) > self._most
        self._rest = b"" if self._is_long else self._rest + part

    def _line(self, part: bytes) -> Iterator[RawLine]:
        self._keep(part)
        self._number += 1
        line = RawLine(self._number, None if self._is_long else self._rest)
        self._rest, self._is_long = b"", False
        if line.data is None or line.data.removeprefix(BOM_UTF8).strip():
            yield line


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A valid line. `size`: its bytes."""

    number: int
    custom_id: str
    body: dict[str, Any]
    size: int


@dataclass(frozen=True, slots=True)
class LineReason:
    """Why a line, or (None) the whole file, cannot be used: an entry of OpenAI's `errors.data`."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


def read_line(raw: RawLine, endpoint: str) -> BatchLine | LineReason:
    """Return a line, or the reason why it cannot be used."""
    if raw.data is None:
        return LineReason("line_too_large", f"line {raw.number} is larger than a request may be", raw.number)
    data = raw.data.removeprefix(BOM_UTF8) if raw.number == 1 else raw.data
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return LineReason("invalid_json_line", f"line {raw.number} is not valid JSON: {error}", raw.number)
    if is_too_deep(data, values):
        reason = f"line {raw.number} is nested more than {MOST_LEVELS} levels deep"
        return LineReason("invalid_json_line", reason, raw.number)
    return _misfit(raw.number, values, endpoint) or BatchLine(
        raw.number, values["custom_id"], values["body"], len(data)
    )


def _misfit(number: int, values: Any, endpoint: str) -> LineReason | None:
    """Return why the values of a line do not fit its batch."""
    if not isinstance(values, dict):
        return LineReason("invalid_json_line", f"line {number} is not a JSON object", number)
    for name in _KEYS:
        if name not in values:
            return LineReason("missing_required_parameter", f"line {number}: {name} is missing", number, name)
    for name in values.keys() - set(_KEYS):
        reason = f"line {number}: unknown key {name[:64]!r}; known: {', '.join(_KEYS)}"
        return LineReason("unknown_parameter", reason, number, name[:64])
    custom_id = values["custom_id"]
    checks = (
        ("custom_id", isinstance(custom_id, str) and 0 < len(custom_id) <= MOST_ID, f"1 to {MOST_ID} characters"),
        ("method", values["method"] == "POST", "POST"),
        ("url", values["url"] == endpoint, f"the endpoint of the batch, {endpoint}"),
        ("body", isinstance(values["body"], dict), "a JSON object"),
    )
    wrong = ((name, expected) for name, is_right, expected in checks if not is_right)
    return next(
        (
            LineReason(f"invalid_{name}", f"line {number}: {name} must be {expected}", number, name)
            for name, expected in wrong
        ),
        None,
    )


class FileCheck:
    """Checks all lines of a file in order: each by itself, unique ids, and their number."""

    def __init__(self, endpoint: str) -> None:
        self.total, self.reasons = 0, list[LineReason]()
        self._endpoint, self._seen = endpoint, set[bytes]()

    @property
    def is_over(self) -> bool:
        """Whether the result is known without the other lines."""
        return len(self.reasons) >= MOST_REASONS or self.total > MOST_LINES

    def take(self, raw: RawLine) -> None:
        """Check the next line."""
        self.total += 1
        line = read_line(raw, self._endpoint)
        if isinstance(line, LineReason):
            self.reasons.append(line)
            return
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            message = f"line {line.number}: custom_id {line.custom_id[:64]!r} occurs in an earlier line"
            self.reasons.append(LineReason("duplicate_custom_id", message, line.number, "custom_id"))
        self._seen.add(digest)

    def result(self) -> list[LineReason]:
        """Return why the file cannot be used; empty: it can."""
        if self.total > MOST_LINES:
            return [LineReason("too_many_lines", f"the file has more than {MOST_LINES} lines; split it")]
        if not self.total:
            return [LineReason("empty_file", "the file has no lines")]
        return self.reasons[:MOST_REASONS]
