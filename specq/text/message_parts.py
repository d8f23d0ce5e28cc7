"""What a chat message says, where its content comes in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specq.protocol import JobError


class UnsupportedPartError(JobError):
    """A part is something else than text."""


def joined_parts(name: str, parts: Sequence[Any]) -> str:
    """Return parts of text as one text, a line each; `name` is what they are called where one is refused. Raises JobError for what is no part, and
    UnsupportedPartError for what is no text."""
    return "\n".join(_text(f"{name}[{place}]", part) for place, part in enumerate(parts))


def _text(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else None
    if kind is not None and kind != "text":
        raise UnsupportedPartError(f"{name} is of type {kind!r:.40}; only text is supported")
    if not isinstance(text, str):
        raise JobError(f'{name} must be {{"type": "text", "text": ...}}')
    return text
