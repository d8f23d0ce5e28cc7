"""What a chat message says, where its content comes in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specq.protocol import JobError


class UnsupportedPartError(JobError):
    """A part is something else than text."""


def joined_parts(name: str, parts: Sequence[Any], kinds: Sequence[str] = ("text",)) -> str:
    """Return parts of text as one text, a line each; `name` is what they are called where one is refused, `kinds` the types of parts that are text.
    Raises JobError for what is no part, and UnsupportedPartError for what is no text."""
    return "\n".join(_text(f"{name}[{place}]", part, kinds) for place, part in enumerate(parts))


def _text(name: str, part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind in kinds else None
    if kind is not None and kind not in kinds:
        raise UnsupportedPartError(
            f"{name} is of type {kind!r:.40}; only text is supported, of type {' or '.join(map(repr, kinds))}"
        )
    if not isinstance(text, str):
        raise JobError(f'{name} must be {{"type": "{kinds[0]}", "text": ...}}')
    return text
