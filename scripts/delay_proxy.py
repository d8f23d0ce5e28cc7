"""A slow network for one machine: carries ZeroMQ messages between DEALERs (drafters, clients) and a broker, later.

    python scripts/delay_proxy.py --listen tcp://127.0.0.1:6000 --upstream tcp://127.0.0.1:5750 --rtt-ms 20
    specq worker --role draft --broker tcp://127.0.0.1:6000

Each peer gets a connection of its own to the broker, under the peer's own identity, so that neither side sees the proxy.
Whole messages are delayed, in order (unless --reorder), by the rule of `specq.simulate.network`; half of the round trip each
way. With --cut a peer's connection is lost now and then, with all that is in flight, and comes back after a while. A peer
that is gone, or silent for --idle-s, is forgotten.

Before a broker with keys it needs --keys too. Messages cannot be told apart without ending CURVE, so it is the broker to its
peers, and to the broker each peer under that peer's own key: roles and owners of jobs are as without it. It therefore needs a
directory with the secrets of all, as of `specq up` on one machine, and is refused any other. It knows the keys that are
there when it starts.
"""

from __future__ import annotations

import heapq
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import zmq

from specq.config.addresses import check_bind, check_connect
from specq.protocol.errors import ConfigError, SpecqError
from specq.simulate.network import Line, LineSettings
from specq.transport.keys import ROLES, SECRET, AllowList, curve_to_broker, directory_of, own_keys
from specq.transport.sockets import bind_router, connect_dealer, drain, drain_named, try_send
from specq.transport.zap import Zap

_LONGEST_WAIT_S = 0.5

Frames = list[bytes]


@dataclass(slots=True)
class Peer:
    """One DEALER: its connection to the broker, None while it is cut, and the lines up to the broker and down.

    `key` is the name of its key, "" without keys.
    """

    identity: bytes
    key: str
    up: Line
    down: Line
    upstream: zmq.Socket[bytes] | None = None
    connection: int = 0  # how many it has had: what was sent over an earlier one is lost
    cut_until: float = 0.0
    heard: float = 0.0


@dataclass(slots=True)
class Cuts:
    """How connections are lost: with a chance at each message, for so many seconds."""

    chance: float = 0.0
    seconds: float = 0.2
    random: random.Random = field(default_factory=random.Random)


class Keyring:
    """The broker's own key, which the proxy shows its peers, and each peer's, which it shows the broker.

    Raises ConfigError unless the directory has the secrets of all.
    """

    def __init__(self, keys: str) -> None:
        self.broker = own_keys(keys, "broker")
        directory = directory_of(keys)
        self.allowed = AllowList(directory)
        missing = [name for name in self.allowed.grants if not (directory / f"{name}{SECRET}").exists()]
        if missing:
            raise ConfigError(
                f"to the broker the proxy is each of its peers, and needs their secret keys; {directory} has none of "
                f"{', '.join(missing)}"
            )
        self.curves = {name: curve_to_broker(str(directory / name), *ROLES) for name in self.allowed.grants}


class DelayProxy:
    """The proxy and its event loop: messages in, a heap of what is due, messages out."""

    def __init__(
        self,
        listen: str,
        upstream: str,
        line: LineSettings,
        *,
        cuts: Cuts | None = None,
        keys: str = "",
        idle_s: float = 10.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upstream, self.line, self.cuts, self.idle_s, self.seed = upstream, line, cuts or Cuts(), idle_s, seed
        self.clock = clock
        self.keyring = Keyring(keys) if keys else None
        self.context = zmq.Context()
        self.zap = Zap(self.context, self.keyring.allowed) if self.keyring else None
        self.router, self.address = bind_router(self.context, listen, self.keyring.broker if self.keyring else None)
        self.peers: dict[bytes, Peer] = {}
        self.num_carried = self.num_cut = self.num_dropped = 0
        self._num_peers = 0
        self._due: list[tuple[float, int, bool, Peer, int, Frames]] = []  # (time, order, up, peer, connection, frames)
        self._order = 0

    def turn(self, longest_wait_s: float = _LONGEST_WAIT_S) -> None:
        """Send what is due, take in what arrived; if nothing did, wait until something arrives or is due.

        A socket tells only once that it is readable, so nothing touches the sockets between finding them empty and the
        wait.
        """
        self._send_due()
        self._forget_idle()
        if self._admit() | self._take_in_front() | self._take_in_back():
            return
        due_in = self._due[0][0] - self.clock() if self._due else longest_wait_s
        if due_in > 0:
            select.select(self._descriptors(), [], [], min(due_in, longest_wait_s))

    def _descriptors(self) -> list[int]:
        own = [self.router] if self.zap is None else [self.router, self.zap.socket]
        sockets = [*own, *(peer.upstream for peer in self.peers.values() if peer.upstream is not None)]
        return [socket.getsockopt(zmq.FD) for socket in sockets]

    # --- in ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Let in, or not, whose key connects; False if nobody does."""
        if self.zap is None or not self.zap.socket.poll(0):
            return False
        self.zap.answer()
        return True

    def _arrived(self) -> Iterator[tuple[str, Frames]]:
        if self.keyring is None:
            return (("", frames) for frames in drain(self.router))
        named = ((self.keyring.allowed.who(user_id), frames) for user_id, frames in drain_named(self.router))
        return ((name, frames) for name, frames in named if name)

    def _take_in_front(self) -> bool:
        """Note when what peers sent is due at the broker; False if they sent nothing."""
        found = False
        for key, (identity, *frames) in self._arrived():
            found, now = True, self.clock()
            peer = self._peer(identity, key)
            peer.heard = now
            if now >= peer.cut_until and peer.upstream is None:
                self._connect(peer)
            self._schedule(peer, frames, now, up=True)
        return found

    def _take_in_back(self) -> bool:
        """Note when what the broker sent is due at the peers; False if it sent nothing."""
        found = False
        for peer in self.peers.values():
            socket = peer.upstream
            for frames in drain(socket) if socket is not None else ():
                found = True
                self._schedule(peer, frames, self.clock(), up=False)
                if peer.upstream is not socket:  # just cut
                    break
        return found

    def _schedule(self, peer: Peer, frames: Frames, now: float, *, up: bool) -> None:
        if self.cuts.chance and self.cuts.random.random() < self.cuts.chance:
            self._cut(peer, now)
        if peer.upstream is None:
            self.num_dropped += 1
            return
        line = peer.up if up else peer.down
        arrivals = line.arrivals(now, sum(map(len, frames)))
        self.num_dropped += not arrivals
        for time_due in arrivals:
            self._order += 1
            heapq.heappush(self._due, (time_due, self._order, up, peer, peer.connection, frames))

    # --- out --------------------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= self.clock():
            _, _, up, peer, connection, frames = heapq.heappop(self._due)
            if peer.connection != connection or peer.upstream is None:
                self.num_dropped += 1
            elif up:
                self._count(sent=try_send(peer.upstream, frames))
            else:
                sent = try_send(self.router, [peer.identity, *frames])
                self._count(sent=sent)
                if not sent:
                    self._forget(peer)

    def _count(self, *, sent: bool) -> None:
        self.num_carried += sent
        self.num_dropped += not sent

    # --- peers ------------------------------------------------------------------------------------------------------

    def _peer(self, identity: bytes, key: str) -> Peer:
        """Return who sent this, met now if need be; an identity under another key is somebody else."""
        peer = self.peers.get(identity)
        if peer is not None and peer.key == key:
            return peer
        if peer is not None:
            self._forget(peer)
        self._num_peers += 1
        name = f"{self.seed} {self._num_peers}"
        peer = self.peers[identity] = Peer(
            identity, key, Line(self.line, name + " up"), Line(self.line, name + " down")
        )
        return peer

    def _connect(self, peer: Peer) -> None:
        """Connect to the broker as the peer; what is sent before the connection stands waits, bounded."""
        curve = self.keyring.curves.get(peer.key) if self.keyring is not None else None
        if self.keyring is None or curve is not None:
            identity = peer.identity
            peer.upstream = connect_dealer(self.context, self.upstream, queue=True, curve=curve, identity=identity)
            peer.connection += 1

    def _cut(self, peer: Peer, now: float) -> None:
        if peer.upstream is not None:
            self.num_cut += 1
            peer.upstream.close(0)
            peer.upstream = None
            peer.cut_until = now + self.cuts.seconds

    def _forget_idle(self) -> None:
        now = self.clock()
        for peer in [peer for peer in self.peers.values() if peer.heard < now - self.idle_s]:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if self.peers.pop(peer.identity, None) is not None and peer.upstream is not None:
            peer.upstream.close(0)
            peer.upstream = None

    def close(self) -> None:
        """Close all sockets; what is in flight is lost."""
        self.context.destroy(0)


def line_settings(
    rtt_ms: float, jitter_ms: float, bandwidth_mbit: float, loss: float, double: float = 0.0, *, reorder: bool = False
) -> LineSettings:
    """Return the settings of each direction."""
    return LineSettings(
        delay_s=rtt_ms / 2000,
        jitter_s=jitter_ms / 1000,
        bytes_per_s=bandwidth_mbit * 1e6 / 8,
        loss=loss,
        double=double,
        in_order=not reorder,
    )


@click.command()
@click.option("--listen", default="tcp://127.0.0.1:*", show_default=True, help="Where peers connect; *: any free port.")
@click.option("--upstream", default="tcp://127.0.0.1:5750", show_default=True, help="The broker.")
@click.option("--rtt-ms", type=click.FloatRange(0), default=20.0, show_default=True, help="Added to a round trip.")
@click.option("--jitter-ms", type=click.FloatRange(0), default=0.0, help="Mean of what each way is late by, besides.")
@click.option("--bandwidth-mbit", type=click.FloatRange(0), default=0.0, help="Of each peer, each way; 0: unlimited.")
@click.option("--loss", type=click.FloatRange(0, 1), default=0.0, help="Chance that a message is lost.")
@click.option("--double", type=click.FloatRange(0, 1), default=0.0, help="Chance that a message comes twice.")
@click.option("--reorder", is_flag=True, help="Let a message with less jitter overtake others.")
@click.option(
    "--cut", type=click.FloatRange(0, 1), default=0.0, help="Chance at each message that its connection is lost."
)
@click.option("--cut-ms", type=click.FloatRange(0), default=500.0, show_default=True, help="How long it is lost.")
@click.option("--idle-s", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Silence that ends a peer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of jitter, losses and cuts.")
@click.option("--keys", default="", help="Directory of CURVE keys, with everyone's secrets; none: no encryption.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without keys.")
def main(
    listen: str,
    upstream: str,
    *,
    cut: float,
    cut_ms: float,
    idle_s: float,
    seed: int,
    keys: str,
    insecure: bool,
    **line: Any,
) -> None:
    """Delay what peers and a broker send each other; the first line of output is the address to connect to."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_bind("--listen", listen, insecure=insecure or bool(keys))
        check_connect("--upstream", upstream)
        cuts = Cuts(cut, cut_ms / 1000, random.Random(f"{seed} cuts"))
        proxy = DelayProxy(listen, upstream, line_settings(**line), cuts=cuts, keys=keys, idle_s=idle_s, seed=seed)
    except SpecqError as error:
        click.echo(f"delay_proxy: {error}", err=True)
        sys.exit(2)
    click.echo(proxy.address)
    sys.stdout.flush()
    serve(proxy)


def serve(proxy: DelayProxy) -> None:
    """Run until the process is asked to end; tell what was carried."""
    try:
        while True:
            proxy.turn()
    except KeyboardInterrupt:
        told: Sequence[tuple[str, int]] = (
            ("carried", proxy.num_carried), ("dropped", proxy.num_dropped), ("cut", proxy.num_cut)
        )  # fmt: skip
        click.echo(", ".join(f"{name} {count}" for name, count in told), err=True)
    finally:
        proxy.close()


if __name__ == "__main__":
    main()
