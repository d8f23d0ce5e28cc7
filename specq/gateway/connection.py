"""Connections: how many there may be, and how long a client may take for its headers.

uvicorn bounds the size of headers and the idle time between requests, and has no limit on how slowly headers arrive.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

DEAD_MS = 60_000  # after which a peer that acknowledges nothing is given up


def limited_protocol(header_s: float, most: int) -> type[H11Protocol]:
    """Return uvicorn's protocol with a time limit for headers, and at most so many connections."""

    class Limited(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
                return
            _give_up_on_the_dead(transport.get_extra_info("socket"))
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Let the time run while a request has begun to arrive, or the first one has not."""
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._forget()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(header_s, self.transport.abort)

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Limited


def _give_up_on_the_dead(connection: Any) -> None:
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_MS)
