"""ZeroMQ sockets for all processes: their queues are bounded, they never block, and they close soon.

The purpose of the options (measured on libzmq 4.3.5):

- MANDATORY: without it, a ROUTER drops messages silently at its high-water mark.
- HANDOVER: without it, a ROUTER ignores a peer that returns early under its identity. Early means before the old
  connection is known to be dead. Identities are random, so a peer cannot take another's place.
- IMMEDIATE: without it, a DEALER queues while it has no peer.
- LINGER: with -1 the process hangs at exit.
- TCP_MAXRT: without it, a DEALER uses a connection whose network is gone for up to 15 minutes. With it, it connects
  anew, under the same identity. Large messages on slow lines count as signs of life, as they do not for ZMQ's pings.
- IPV6: without it, IPv6 addresses are refused. With it, a name with both families means IPv6 alone.

Rule: a context is made in the process that uses it. With keys, a socket speaks CURVE only: see `specq.transport.keys`.

Admission: libzmq asks the handler `Zap` before it accepts a CURVE connection (ZAP, rfc.zeromq.org/27). The handler is
one more socket in a process's Poller loop, without a thread. Its answer for a key (`AllowList.user_id`) becomes the
`User-Id` of every message of that connection (`drain_named`). Libzmq asks only once per connection. So the receiver of
a message asks `AllowList.who` whether the key still is on the list.

Rule: make the handler before a socket is bound. A CURVE socket without it admits no peer.

This module also has tools for main loops: a flag that signals set, and a timer.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import structlog
import zmq
from zmq.utils import z85

from specq.protocol import MAX_ARRAY, ConfigError, parse_address
from specq.transport.keys import AllowList, Curve, KeyPair
from specq.transport.network import needs_ipv6, why_not_bound, why_unreachable

log = structlog.get_logger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the protocol
_VERSION = b"1.0"


class Zap:
    """The one handler of a context. `socket` is readable when there are requests to `answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: AllowList) -> None:
        self.allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def refresh(self) -> None:
        """Read the allow-list again if it has changed. A malformed one has no effect."""
        try:
            self.allowed.refresh()
        except ConfigError as error:
            log.warning("allow_list_read_failed", reason=str(error))

    def answer(self) -> None:
        """Admit or refuse the keys of the waiting requests."""
        self.refresh()
        while self.socket.poll(0, zmq.POLLIN):
            request = self.socket.recv_multipart()
            request_id, user_id = request[1] if len(request) > 1 else b"", self._user_id(request)
            status = [b"200", b"OK", user_id.encode()] if user_id else [b"400", b"unknown key", b""]
            self.socket.send_multipart([_VERSION, request_id, *status, b""])

    def _user_id(self, request: list[bytes]) -> str:
        """Return the mark of a request's key, or "" if it is not on the list.

        Frames: version, id, domain, address, identity, mechanism, public key.
        """
        if len(request) != 7 or request[0] != _VERSION or request[5] != b"CURVE" or len(request[6]) != 32:
            return ""
        user_id = self.allowed.user_id(z85.encode(request[6]))
        if not user_id:
            log.warning("key_refused", address=request[3].decode("ascii", "replace"))
        return user_id


HIGH_WATER_MARK = 10_000
LINGER_MS = 500
MAX_UNCONFIRMED_MS = 2000  # that the other side's system confirms no byte, until a connection is given up
# Plain integers: combining and checking pyzmq's enumerations took a third of the time of sending a message.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
DRAIN_LIMIT = 512  # messages taken from one socket before the other sockets get their turn
ZAP_DOMAIN = b"specq"
IN_USE = "another broker or worker may use it; choose another address with --bind"


def _prepare(socket: zmq.Socket[bytes], most_queued: int = HIGH_WATER_MARK) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, most_queued)
    socket.setsockopt(zmq.RCVHWM, most_queued)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ARRAY)  # of a frame; a peer that sends a larger one is disconnected
    return socket


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    own: KeyPair | None = None,
    *,
    most_queued: int = HIGH_WATER_MARK,
) -> tuple[zmq.Socket[bytes], str]:
    """Return a ROUTER bound to `endpoint`, and its address.

    With keys (`own`), it admits the peers that the context's `Zap` allows. Raises ConfigError if it cannot be bound.
    """
    socket = _prepare(context.socket(zmq.ROUTER), most_queued)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if own is not None:
        _set_keys(socket, own)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    address = parse_address(endpoint)
    try:
        socket.setsockopt(zmq.IPV6, needs_ipv6(address, connects=False))
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(
            f"cannot bind {endpoint}: {why_not_bound(address, error.errno or zmq.EINVAL, IN_USE)}"
        ) from None
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    *,
    queue: bool = False,
    curve: Curve | None = None,
    identity: bytes = b"",
) -> zmq.Socket[bytes]:
    """Return a DEALER that connects to `endpoint`. With `curve`, only to a peer that has its `server_key`.

    An empty `identity` becomes a random one. Without a peer, sending fails. With `queue`, messages wait for the
    connection, up to the high-water mark. Raises ConfigError if it cannot connect.
    """
    socket = _prepare(context.socket(zmq.DEALER))
    if curve is not None:
        _set_keys(socket, curve.own)
        socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_key)
    socket.setsockopt(zmq.IDENTITY, identity or b"\x01" + secrets.token_bytes(8))
    socket.setsockopt(zmq.IMMEDIATE, 0 if queue else 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.TCP_MAXRT, MAX_UNCONFIRMED_MS)
    try:
        socket.setsockopt(zmq.IPV6, needs_ipv6(parse_address(endpoint), connects=True))
        socket.connect(endpoint)
    except (ConfigError, zmq.ZMQError) as error:
        socket.close(0)
        reason = error if isinstance(error, ConfigError) else why_unreachable(endpoint) or error.strerror
        raise ConfigError(f"cannot connect to {endpoint!r}: {reason}") from None
    return socket


_NAMED = b"\x02"  # begins the identity of a broker's socket
MOST_NAME = 240  # bytes; an identity has at most 255


def broker_identity(name: str) -> bytes:
    """Return a new identity for a DEALER of the broker with this name, so that verifiers know whose messages they are.

    Raises ConfigError if the name has more than MOST_NAME bytes.
    """
    if len(encoded := name.encode()) > MOST_NAME:
        raise ConfigError(f"the broker's address has {len(encoded)} bytes, but must have at most {MOST_NAME}: {name}")
    return _NAMED + secrets.token_bytes(8) + encoded


def broker_in(identity: bytes) -> str:
    """Return the name in an identity that `broker_identity` returned, or ""."""
    return identity[9:].decode("utf-8", "replace") if identity.startswith(_NAMED) else ""


def connect_again(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect a socket without a connection once more, by the address family by which the peer listens.

    Libzmq gives up for good when a peer refuses the handshake, for example because it does not know the key yet.
    """
    with contextlib.suppress(zmq.ZMQError):  # the connection is gone already
        socket.disconnect(endpoint)
    socket.setsockopt(zmq.IPV6, needs_ipv6(parse_address(endpoint), connects=True))
    socket.connect(endpoint)


def _set_keys(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret_key)


def try_send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    """Send without blocking. Return False if the peer is gone or its queue is full."""
    last = len(frames) - 1
    try:
        for i in range(last):
            socket.send(frames[i], _NOBLOCK_MORE)
        socket.send(frames[last], _NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True


def drain(socket: zmq.Socket[bytes], limit: int = DRAIN_LIMIT) -> Iterator[list[bytes]]:
    """Yield the messages that have arrived, at most `limit`, without blocking."""
    for first in _firsts(socket, limit):
        yield _rest(socket, first)


def drain_named(socket: zmq.Socket[bytes], limit: int = DRAIN_LIMIT) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the messages that have arrived at a CURVE socket, each with its key's mark (`AllowList.user_id`)."""
    for first in _firsts(socket, limit):
        user_id = str(first.get("User-Id"))
        yield user_id, _rest(socket, first)


def _firsts(socket: zmq.Socket[bytes], limit: int) -> Iterator[zmq.Frame]:
    for _ in range(limit):
        try:
            yield socket.recv(_NOBLOCK, copy=False)
        except zmq.Again:
            return


def _rest(socket: zmq.Socket[bytes], frame: zmq.Frame) -> list[bytes]:
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames


def calm_collector() -> None:
    """Run Python's cycle collector rarely. It took a third of a broker's time, and there are hardly any cycles.

    Call it after all long-lived objects have been made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class Stop:
    """True once the process was asked to stop (SIGTERM, SIGINT). `asked_again`: it must not drain.

    While `at_once` is set, a signal ends the process at once, with status 0. At that time the process holds no data.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.asked = self.asked_again = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.at_once:
            raise SystemExit(0)
        self.asked, self.asked_again = True, self.asked

    def __bool__(self) -> bool:
        return self.asked


class Beat:
    """A timer for periodic work."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_s = interval_ms / 1000
        self._next = time.monotonic()

    def due(self) -> bool:
        """Return True once in each interval."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.interval_s
        return True

    def remaining_ms(self) -> int:
        """Return the milliseconds until it is due, at least 0."""
        return max(0, int((self._next - time.monotonic()) * 1000) + 1)
