"""Server-sent events: the bytes of an event, and positions in a stream as event ids; pure.

Rule: an event's id is the reader's position after this event. The reader can resume there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import orjson

from specq.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
MOST_TOKENS_DIGITS = 10
_CHOICE = re.compile(rf"-|\d{{1,{MOST_TOKENS_DIGITS}}}e?")


def event(data: Any, event_id: str = "") -> bytes:
    """Return an event that carries JSON."""
    head = f"id: {event_id}\n".encode() if event_id else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """The sent part of one completion: its opening, number of tokens, and end."""

    is_open: bool = False
    num_tokens: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}{'e' if self.ended else ''}" if self.is_open else "-"


@dataclass(frozen=True, slots=True)
class Position:
    """The sent part of a stream's completions, and of the usage at the end."""

    choices: tuple[ChoiceProgress, ...]
    has_usage: bool = False

    def __str__(self) -> str:
        return ",".join(map(str, self.choices)) + (";u" if self.has_usage else "")

    @property
    def known(self) -> list[int]:
        """Return the number of sent tokens of each completion."""
        return [choice.num_tokens for choice in self.choices]

    def moved(self, choice: int, num_tokens: int = 0, *, ended: bool = False) -> Position:
        """Return the position after `num_tokens` more tokens of a completion, or its end."""
        changed = list(self.choices)
        before = changed[choice]
        changed[choice] = replace(before, is_open=True, num_tokens=before.num_tokens + num_tokens, ended=ended)
        return replace(self, choices=tuple(changed))


def start(num_choices: int) -> Position:
    """Return the position before the first event."""
    return Position((ChoiceProgress(),) * num_choices)


def read_position(event_id: str, num_choices: int) -> Position:
    """Return the position of an event id.

    Raises ApiError if it does not fit such a stream.
    """
    body, _, tail = event_id.partition(";")
    parts = body.split(",")
    if len(parts) != num_choices or tail not in ("", "u") or not all(map(_CHOICE.fullmatch, parts)):
        raise ApiError(
            f"Last-Event-ID is {event_id[:80]!r}, but must be the id of an event of this stream", param="Last-Event-ID"
        )
    return Position(tuple(map(_progress, parts)), has_usage=tail == "u")


def _progress(part: str) -> ChoiceProgress:
    return ChoiceProgress() if part == "-" else ChoiceProgress(True, int(part.rstrip("e")), part.endswith("e"))
