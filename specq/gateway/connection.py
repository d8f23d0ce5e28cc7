"""Connections: their number, and time limits for clients.

They limit the time for headers, for the rest of refused bodies, and for reading. uvicorn bounds only the size of
headers and the idle time between requests.

Rule: with too many connections, the gateway closes the connection idle for longest. So no client can block others by
connecting. A connection with an unfinished answer is closed only if all others have one too.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from specq.gateway.errors import ApiError

DEAD_MS = 60_000  # time after which a peer without acknowledgements is closed
SEND_BYTES = 1 << 17  # buffer of the system for a slow reader (Linux: twice as many)
LINGER_S = 2.0  # time for a client to read why its body was refused


class Limited(H11Protocol):
    """uvicorn's protocol with limits; a subclass sets them (`limited_protocol`)."""

    header_s: float
    most: int
    stall_s: float
    waiting: dict[Limited, None]  # connections without a request, the oldest first

    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _lingers = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            oldest = self._longest_waiting()
            self.waiting.pop(oldest, None)
            oldest.transport.abort()
        _bound(transport.get_extra_info("socket"))
        self._watch()

    def _longest_waiting(self) -> Limited:
        """Return the connection that has waited longest for a request.

        Connections that have all of their answers come first.
        """
        answered = (one for one in self.waiting if not one.transport.get_write_buffer_size())
        return next(answered, next(iter(self.waiting), self))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._set_deadline(None)
        super().connection_lost(exc)
        self.resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.waiting[self] = None  # uvicorn's own limit for idle connections applies
        else:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def _await_reader(self, before: int | None = None) -> None:
        """Close the connection if its reader has taken no bytes for too long.

        before  bytes that waited for the reader at the last check.
        """
        size = self.transport.get_write_buffer_size()
        if before is not None and size >= before:
            self.transport.abort()
        else:
            self._stall = self.loop.call_later(self.stall_s, self._await_reader, size)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP; if an answer has begun, end it."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = orjson.dumps(ApiError("the request is not valid HTTP", code="invalid_http").body)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=400, headers=[*headers.items()])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Run the timer while data is due.

        It is due while a request is incomplete, the first one is missing, or a refused body continues.
        """
        theirs, ours = self.conn.their_state, self.conn.our_state
        is_refused = theirs is h11.SEND_BODY and ours is h11.DONE
        if self.transport.is_closing() or not (theirs is h11.IDLE or is_refused):
            self.waiting.pop(self, None)
            self._set_deadline(None)
        elif is_refused and not self._lingers:
            self._set_deadline(min(self.header_s, LINGER_S), lingers=True)
        elif theirs is h11.IDLE and (self._deadline is None or self._lingers):
            self.waiting.setdefault(self)
            self._set_deadline(self.header_s)

    def _set_deadline(self, seconds: float | None, *, lingers: bool = False) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._lingers = lingers
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def limited_protocol(header_s: float, most: int, stall_s: float = 60.0) -> type[Limited]:
    """Return the protocol of a server.

    header_s  seconds for headers.
    most      most connections.
    stall_s   seconds in which a reader may take no bytes.
    """
    limits = {"header_s": header_s, "most": most, "stall_s": stall_s, "waiting": {}}
    return type("LimitedHere", (Limited,), limits)


def _bound(connection: socket.socket | None) -> None:
    """Bound the system's buffer and the time for a lost reader; send data at once.

    An answer is a head and a body. A stream is a series of events. A system that may wait sends the second part only
    after the first is acknowledged. This takes 40 ms. asyncio turns this off only for sockets created with a protocol
    number.
    """
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_MS)
