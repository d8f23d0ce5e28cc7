"""Requests in, replies out: bodies within their limits, and replies that end when the client goes.

Server-sent events: bytes of an event, and positions in a stream as event ids; pure.

Rule: an event's id says what of the stream the reader has once it has this event, so that it can go on from there.
"""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specq.gateway.errors import ApiError
from specq.protocol import MOST_LEVELS, is_too_deep

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
    """What of one completion is sent: whether it was opened, how many tokens, whether its end."""

    is_open: bool = False
    num_tokens: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}{'e' if self.ended else ''}" if self.is_open else "-"


@dataclass(frozen=True, slots=True)
class Position:
    """What of all completions of a stream is sent, and whether the numbers at the end are."""

    choices: tuple[ChoiceProgress, ...]
    has_usage: bool = False

    def __str__(self) -> str:
        return ",".join(map(str, self.choices)) + (";u" if self.has_usage else "")

    @property
    def known(self) -> list[int]:
        """Return of each completion how many tokens are sent."""
        return [choice.num_tokens for choice in self.choices]

    def moved(self, choice: int, num_tokens: int = 0, *, ended: bool = False) -> Position:
        """Return the position after so many more tokens of a completion, or its end."""
        changed = list(self.choices)
        before = changed[choice]
        changed[choice] = replace(before, is_open=True, num_tokens=before.num_tokens + num_tokens, ended=ended)
        return replace(self, choices=tuple(changed))


def start(num_choices: int) -> Position:
    """Return the position before the first event."""
    return Position((ChoiceProgress(),) * num_choices)


def read_position(event_id: str, num_choices: int) -> Position:
    """Return the position that an event id names; raises ApiError for one that is not of such a stream."""
    body, _, tail = event_id.partition(";")
    parts = body.split(",")
    if len(parts) != num_choices or tail not in ("", "u") or not all(map(_CHOICE.fullmatch, parts)):
        raise ApiError(
            f"Last-Event-ID is {event_id[:80]!r}; it must be the id of an event of this stream", param="Last-Event-ID"
        )
    return Position(tuple(map(_progress, parts)), has_usage=tail == "u")


def _progress(part: str) -> ChoiceProgress:
    return ChoiceProgress() if part == "-" else ChoiceProgress(True, int(part.rstrip("e")), part.endswith("e"))


def all_ended(choices: Sequence[ChoiceProgress]) -> bool:
    """Return whether the ends of all completions are sent."""
    return all(choice.ended for choice in choices)


T = TypeVar("T")
GRACE_S = 5.0  # beyond the total time, for a reader that takes nothing


class ClientGoneError(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What one request may take: bytes and seconds of its body, seconds in all."""

    body_bytes: int
    body_s: float
    total_s: float


def json_response(content: Any, status: int = 200) -> Response:
    """Return JSON."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return an error in OpenAI's format."""
    response = json_response(error.body, error.status)
    response.headers.update(error.headers)
    return response


async def read_json(request: Request, limits: BodyLimits) -> tuple[Any, int]:
    """Return the body as JSON, and its size; raises ApiError for one that is too large, too slow, or not JSON."""
    _check_form(request.headers)
    try:
        async with asyncio.timeout(limits.body_s):
            data = await _read(request, limits.body_bytes)
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {limits.body_s:g} s", 408) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    try:
        body = orjson.loads(data.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if is_too_deep(data, body):
        raise ApiError(f"the body is nested more than {MOST_LEVELS} levels deep", code="invalid_json")
    return body, len(data)


def _check_form(headers: Headers) -> None:
    """Raise ApiError for a body that is not said to be plain JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a form of a foreign page cannot send
        raise ApiError("Content-Type must be application/json", 415, "Content-Type")
    coding = ", ".join(headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        reason = f"Content-Encoding is {coding[:80]}; send the body uncompressed"
        raise ApiError(reason, 415, "Content-Encoding", headers={"accept-encoding": "identity"})


async def _read(request: Request, most: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise ApiError(f"the body is larger than {most} bytes", 413)
    return bytes(data)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns; it is cancelled when the client goes, and ClientGoneError raised."""
    working, going = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, going):
            task.cancel()
        await asyncio.gather(working, going, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of events; `close` is called in any case, also if the client goes before the first."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], total_s: float) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._events, self._close, self._total_s = events, close, total_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._total_s + GRACE_S):
                await unless_gone(receive, self._send(send))
        except (ClientGoneError, TimeoutError):
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
