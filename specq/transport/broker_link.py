"""A worker's link to one broker: a DEALER over which it registers, sends heartbeats, and receives messages.

`specq.transport.broker_links` has all links of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NoReturn

import structlog
import zmq

from specq.protocol import (
    DIALS_OUT,
    MANY_DRAFTS,
    OLDEST_VERSION,
    ConfigError,
    Frames,
    Heartbeat,
    Hello,
    Message,
    ProtocolError,
    Refused,
    Welcome,
    decode,
    encode,
    version_spoken,
)
from specq.transport.keys import Curve
from specq.transport.network import why_unreachable
from specq.transport.sockets import connect_again, connect_dealer, drain, try_send

log = structlog.get_logger(__name__)

HELLO_MS = 500
WARN_S = 5.0  # between warnings about a broker that cannot be reached
WARN_BESIDE_S = 60.0  # the same while another broker is served, because finding the reason may take a second
REST_S = 60.0  # between attempts to register with a broker that refused the worker for good, while others serve it


class BrokerLink:
    """Registers with a broker, again after each of its restarts, and carries messages to and from it.

    name       of the broker: its own address if it says that in `Brokers`, else the address of this link.
    is_named   whether it has said so since it registered this worker.
    listed     the brokers of its journal, by its last `Brokers` since it registered this worker.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        hello: Hello,
        curve: Curve | None = None,
        identity: bytes = b"",
    ) -> None:
        """Connect to the broker, as `connect_dealer` does."""
        self.endpoint = self.name = endpoint
        self.hello, self.is_named, self.listed = hello, False, frozenset[str]()
        self.socket = connect_dealer(context, endpoint, curve=curve, identity=identity)
        self.registered, self.reads_many_drafts = False, False
        self.heartbeat_ms = HELLO_MS
        self.num_dropped = self.num_welcomes = self.num_hellos = 0
        self._warned_at = time.monotonic()
        self._rests_until = 0.0

    @property
    def is_refused(self) -> bool:
        """Whether the broker refused this worker for good a short time ago."""
        return time.monotonic() < self._rests_until

    def send(self, message: Message) -> bool:
        """Send without blocking. Return False if the broker is away or its queue is full."""
        return try_send(self.socket, encode(message))

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send the messages that accompany a heartbeat, if the broker knows this worker."""
        if self.registered:
            for message in messages:
                self.send(message)

    def receive(self, skips: Callable[[Frames], bool] | None = None) -> Iterator[Message]:
        """Yield the broker's messages, without refusals and what `skips` selects. `Welcome` has been handled.

        Raises ConfigError if the broker refuses this worker for good.
        """
        for frames in drain(self.socket):
            if skips is not None and skips(frames):
                continue
            try:
                message = decode(frames)
            except ProtocolError as error:
                self.num_dropped += 1
                log.debug("message_dropped", reason=str(error))
                continue
            if isinstance(message, Refused):
                self._refused(message)
                continue
            if isinstance(message, Welcome):
                self._welcome(message)
            yield message

    def _welcome(self, message: Welcome) -> None:
        if self.hello.role == "target" and not self.hello.endpoint and DIALS_OUT not in message.capabilities:
            self.send(Heartbeat(incarnation=self.hello.incarnation, state="leaving"))
            self._rest("is older and connects to verifiers, but this one has no address: update it, or set target.bind")
        if not self.registered:
            self.num_welcomes += 1
            self.is_named, self.listed = False, frozenset()
        self.registered, self.heartbeat_ms = True, max(message.heartbeat_ms, 10)
        self.reads_many_drafts = MANY_DRAFTS in message.capabilities
        log.info("worker_welcomed", name=self.hello.name, broker=self.endpoint, capabilities=message.capabilities)

    def _refused(self, message: Refused) -> None:
        """Handle a refusal. A broker that is one version older receives a `Hello` that it can read."""
        if version_spoken(message.reason) == OLDEST_VERSION:
            self.send(self.hello.of_before())
            return
        self.registered = False
        if message.fatal:
            self._rest(f"refuses this worker: {message.reason}")

    def _rest(self, reason: str) -> NoReturn:
        """Leave this broker alone for a while. Raises ConfigError."""
        self._rests_until = time.monotonic() + REST_S
        raise ConfigError(f"the broker at {self.endpoint} {reason}")

    def beat(self, heartbeat: Heartbeat, num_dropped: int = 0) -> None:
        """Send a heartbeat to the broker that has registered this worker. `num_dropped`: messages of other sockets."""
        counts = {"reconnects": self.num_welcomes - 1, "messages_dropped": self.num_dropped + num_dropped}
        self.registered = self.send(replace(heartbeat, metrics=heartbeat.metrics | counts))

    def say_hello(self, warn_s: float = WARN_S) -> None:
        """Ask the broker to register this worker. Each `warn_s` seconds without a connection, warn and connect anew."""
        if self.is_refused:
            return
        self.num_hellos += 1
        if not self.send(self.hello) and time.monotonic() - self._warned_at > warn_s:
            self._warned_at = time.monotonic()
            hint = "start one: specq broker; with --keys it needs the public key of this process"
            reason = why_unreachable(self.endpoint)
            log.warning(
                "broker_connection_failed", broker=self.endpoint, **({"reason": reason} if reason else {}), hint=hint
            )
            connect_again(self.socket, self.endpoint)
