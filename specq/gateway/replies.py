"""Requests and replies: bodies within their limits, and replies that end when the client leaves."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specq.gateway.errors import ApiError, on_path
from specq.protocol import MOST_LEVELS, is_too_deep

T = TypeVar("T")
GRACE_S = 5.0  # added to the total time, for a reader that takes no bytes


class ClientGoneError(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of one request: bytes and seconds of its body, seconds in all."""

    body_bytes: int
    body_s: float
    total_s: float


def json_response(content: Any, status: int = 200) -> Response:
    """Return JSON."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """Return an error in the format of the path's API."""
    status, body = on_path(error, path)
    response = json_response(body, status)
    response.headers.update(error.headers)
    return response


async def read_json(request: Request, limits: BodyLimits) -> tuple[Any, int]:
    """Return the body as JSON, and its size.

    Raises ApiError if it is too large, too slow, or not JSON.
    """
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
    """Raise ApiError if the headers do not declare the body as plain JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of a foreign page cannot send this
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
    """Return the result of the work.

    Raises ClientGoneError, and cancels the work, if the client leaves.
    """
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
    """A stream of events. `close` is always called, even if the client leaves before the first event."""

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
