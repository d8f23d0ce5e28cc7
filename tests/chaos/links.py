"""Links of a deployment that the test can cut: the bytes between two parties stop, in one direction or in both.

Each party that listens has one address here, so nobody finds a way around. A link knows who connects from the kernel's
tables. While a pair is cut, its bytes wait and new connections carry nothing: what a network without a route does.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakSet

WAYS = ("up", "down")  # from the one that connects, and to it
LOOK_S = 0.02
PIECE = 1 << 16

Pids = Callable[[], Mapping[str, int]]


class Links:
    """All links, in a thread of their own. `pids`: the processes that may connect, by name."""

    def __init__(self, pids: Pids) -> None:
        self._pids, self._cut = pids, frozenset[tuple[str, str, str]]()
        self._servers = list[asyncio.Server]()
        self._relays = set[asyncio.Task[None]]()  # the loop itself may forget tasks
        self._writers = WeakSet[StreamWriter]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)  # what was accepted before has a task then
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        for writer in self._writers:  # what is left to send to a frozen process would keep a socket open
            writer.transport.abort()
        await asyncio.sleep(0)

    def open(self, name: str, port: int) -> int:
        """Return the port at which others find the party that listens at `port` of this machine."""

        def accept(reader: StreamReader, writer: StreamWriter) -> None:
            relay = self._loop.create_task(self._relay(name, port, reader, writer))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)

        listening = asyncio.start_server(accept, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(60)
        self._servers.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    def cut(self, source: str, to: str, ways: Collection[str] = WAYS) -> None:
        """Let no bytes pass between a party that connects and one that listens; both by the begin of their names."""
        self._cut |= {(source, to, way) for way in ways}

    def heal(self) -> None:
        """Let all bytes pass again."""
        self._cut = frozenset()

    async def _relay(self, name: str, port: int, reader: StreamReader, writer: StreamWriter) -> None:
        self._writers.add(writer)
        source = self._who(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1])
        with suppress(OSError, asyncio.CancelledError), closing(writer):  # nobody listens, or the end of all
            await self._wait(source, name, "up")
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            self._writers.add(far_writer)
            with closing(far_writer):
                up = self._carry(reader, far_writer, source, name, "up")
                down = self._carry(far_reader, writer, source, name, "down")
                await asyncio.gather(up, down)

    async def _carry(self, reader: StreamReader, writer: StreamWriter, source: str, to: str, way: str) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                await self._wait(source, to, way)
                writer.write(piece)
                await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    async def _wait(self, source: str, to: str, way: str) -> None:
        while any(source.startswith(a) and to.startswith(b) and way == c for a, b, c in self._cut):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def _who(self, port: int, own_port: int) -> str:
        """Return which process has the other end of a connection, or ""."""
        inode = _inode(port, own_port)
        for name, pid in self._pids().items():
            with suppress(OSError):
                if any(_target(one) == f"socket:[{inode}]" for one in Path(f"/proc/{pid}/fd").iterdir()):
                    return name
        return ""


def _inode(port: int, to: int) -> str:
    """Return the kernel's number of the socket of this machine with this port that is connected to a port."""
    ends = (f":{port:04X}", f":{to:04X}")
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        columns = line.split()
        if columns[1].endswith(ends[0]) and columns[2].endswith(ends[1]):
            return columns[9]
    return ""


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
