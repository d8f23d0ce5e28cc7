"""A slow network for one machine: it relays the bytes of TCP connections with a delay.

    python -m bench.delay_proxy --upstream tcp://127.0.0.1:5750 --rtt-ms 20
    specq worker --role draft --broker ADDRESS          # the address that the proxy prints

Each connection to the proxy becomes one to the broker. Bytes arrive in order, delayed by the rule of
`specq.simulate.machine`, half of the round trip each way. The proxy does not look at the bytes, so keys (CURVE) work
through it. TCP does not lose bytes, but connections. With --cut-every-s both ends lose their connection now and then,
with all bytes in flight. The next connection waits until --cut-s are over.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import signal
from asyncio import StreamReader, StreamWriter
from collections import deque
from contextlib import suppress
from typing import Any

import click

from specq.config import check_bind, check_connect
from specq.protocol import ConfigError, parse_address
from specq.runtime import Number
from specq.simulate.machine import DelayLine, LineSettings

_PIECE = 1 << 16  # bytes read at once
_MOST_IN_FLIGHT = 4096  # pieces each way; then the sender waits, as for a full socket


class DelayProxy:
    """Relays connections to `upstream` (tcp://HOST:PORT). Times in seconds; `cut_every_s` is a mean, 0 for never."""

    def __init__(
        self, upstream: str, line: LineSettings, *, cut_every_s: float = 0.0, cut_s: float = 0.0, seed: int = 0
    ) -> None:
        self.upstream, self.line, self.seed = _endpoint(upstream), line, seed
        self.cut_every_s, self.cut_s = cut_every_s, cut_s
        self.num_connections = self.num_bytes = self.num_cut = 0
        self._random = random.Random(f"{seed} cuts")
        self._away_until = 0.0

    async def listen(self, address: str) -> str:
        """Accept connections at `address`, whose port may be *; return the actual address."""
        self.server = await asyncio.start_server(self._relay, *_endpoint(address))
        return f"{address.rpartition(':')[0]}:{self.server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Relay one connection until both ends have closed it or it is cut."""
        await asyncio.sleep(self._away_until - asyncio.get_running_loop().time())
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.upstream)
        except OSError:
            writer.close()
            return
        self.num_connections += 1
        up, down = (DelayLine(self.line, f"{self.seed} {self.num_connections} {way}") for way in ("up", "down"))
        ways = [self._carry(reader, far_writer, up), self._carry(far_reader, writer, down)]
        lifetime = self._random.expovariate(1 / self.cut_every_s) if self.cut_every_s else None
        try:
            with suppress(asyncio.CancelledError):  # the proxy ends
                await asyncio.wait_for(asyncio.gather(*ways), lifetime)
        except TimeoutError:
            self.num_cut += 1
            self._away_until = asyncio.get_running_loop().time() + self.cut_s
        finally:
            writer.close()
            far_writer.close()

    async def _carry(self, reader: StreamReader, writer: StreamWriter, line: DelayLine) -> None:
        """Relay the bytes of one end, each piece at its time, up to the end of the stream."""
        loop, ended, room = asyncio.get_running_loop(), asyncio.Event(), asyncio.Semaphore(_MOST_IN_FLIGHT)
        in_flight = deque[bytes]()

        def deliver() -> None:  # arrivals are in order: the oldest piece is due
            piece = in_flight.popleft()
            room.release()
            self.num_bytes += len(piece)
            if not writer.is_closing():
                writer.write(piece)
            if not piece:
                ended.set()

        piece = b"..."
        while piece:
            await room.acquire()
            piece = b""
            with suppress(OSError):  # a closed end neither sends nor receives
                await writer.drain()
                piece = await reader.read(_PIECE)
            (due,) = line.arrivals(loop.time(), len(piece))
            in_flight.append(piece)
            loop.call_at(due, deliver)
        await ended.wait()
        with suppress(OSError):
            writer.write_eof()


def _endpoint(address: str) -> tuple[str | None, int]:
    """Return host and port of tcp://HOST:PORT for asyncio: None for *, 0 for the port *."""
    found = parse_address(address)
    if not found.is_tcp:
        raise ConfigError(f"the delay proxy relays TCP, and {address} is not tcp://HOST:PORT")
    return None if found.host == "*" else found.host, found.port


async def serve(proxy: DelayProxy, listen: str) -> None:
    """Print the address, relay until the process is asked to stop, and print the counts."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    click.echo(await proxy.listen(listen))
    await stop.wait()
    proxy.server.close()
    click.echo(f"connections {proxy.num_connections}, bytes {proxy.num_bytes}, cut {proxy.num_cut}", err=True)


@click.command()
@click.option("--listen", default="tcp://127.0.0.1:*", show_default=True, help="Address for peers; *: any free port.")
@click.option("--upstream", default="tcp://127.0.0.1:5750", show_default=True, help="Address of the broker.")
@click.option("--rtt-ms", type=Number(0), default=20.0, show_default=True, help="Delay added to a round trip.")
@click.option("--jitter-ms", type=Number(0), default=0.0, help="Mean extra delay each way.")
@click.option("--bandwidth-mbit", type=Number(0), default=0.0, help="Bandwidth of a connection, each way. 0: no limit.")
@click.option("--cut-every-s", type=Number(0), default=0.0, help="Mean life of a connection. 0: no cuts.")
@click.option("--cut-s", type=Number(0), default=0.5, show_default=True, help="Seconds that a cut lasts.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of jitter and cuts.")
def main(listen: str, upstream: str, *, rtt_ms: float, jitter_ms: float, bandwidth_mbit: float, **cuts: Any) -> None:
    """Delay the messages between peers and a broker; the first line of output is the address to connect to."""
    line = LineSettings(delay_s=rtt_ms / 2000, jitter_s=jitter_ms / 1000, bytes_per_s=bandwidth_mbit * 1e6 / 8)
    try:
        check_bind("--listen", listen)
        check_connect("--upstream", upstream)
        proxy = DelayProxy(upstream, line, **cuts)
        # select() waits for fractions of a millisecond; other selectors round up to the next millisecond.
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
            runner.run(serve(proxy, listen))
    except (ConfigError, OSError) as error:
        raise click.UsageError(str(error)) from None


if __name__ == "__main__":
    main()
