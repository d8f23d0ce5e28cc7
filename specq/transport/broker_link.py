"""A worker's link to the broker: a DEALER over which it registers, sends heartbeats, and receives messages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import structlog
import zmq

from specq.protocol import (
    OLDEST_VERSION,
    ConfigError,
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
from specq.transport.sockets import Beat, choose_family, connect_dealer, drain, try_send

log = structlog.get_logger(__name__)

HELLO_MS = 500
HELLOS_UNTIL_TOLD = 2  # a present broker answers the first


def new_incarnation() -> int:
    """Return a random number that identifies this start of the process."""
    return secrets.randbits(62)


class BrokerLink:
    """Registers with the broker, again after each of its restarts, and carries messages to and from it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        hello: Hello,
        curve: Curve | None = None,
        tell: Callable[[str], object] = bool,
    ) -> None:
        """Connect to the broker. `tell` is called if it does not answer the first `Hello`."""
        self.endpoint, self.hello, self._tell = endpoint, hello, tell
        self.socket = connect_dealer(context, endpoint, curve=curve)
        self.registered = False
        self.heartbeat = Beat(HELLO_MS)
        self.num_dropped = self.num_welcomes = self._num_hellos = 0
        self._warned_at = time.monotonic()

    def send(self, message: Message) -> bool:
        """Send without blocking. Return False if the broker is away or its queue is full."""
        return try_send(self.socket, encode(message))

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send the messages that accompany a heartbeat, if the broker knows this worker."""
        if self.registered:
            for message in messages:
                self.send(message)

    def receive(self) -> Iterator[Message]:
        """Yield the broker's messages, except the answers to `Hello`, which are handled here.

        Raises ConfigError if the broker refuses this worker for good.
        """
        for frames in drain(self.socket):
            try:
                message = decode(frames)
            except ProtocolError as error:
                self.num_dropped += 1
                log.debug("message_dropped", reason=str(error))
                continue
            if isinstance(message, Welcome):
                self._welcome(message)
            elif isinstance(message, Refused):
                self._refused(message)
            else:
                yield message

    def _welcome(self, message: Welcome) -> None:
        self.num_welcomes += not self.registered
        self.registered = True
        self.heartbeat = Beat(max(message.heartbeat_ms, 10))
        log.info("worker_welcomed", name=self.hello.name, broker=self.endpoint, capabilities=message.capabilities)

    def _refused(self, message: Refused) -> None:
        """Handle a refusal. A broker that is one version older receives a `Hello` that it can read."""
        if version_spoken(message.reason) == OLDEST_VERSION:
            self.send(self.hello.of_before())
        elif message.fatal:
            raise ConfigError(f"the broker at {self.endpoint} refuses this worker: {message.reason}")
        else:
            self.registered = False

    def beat(self, heartbeat: Heartbeat, num_dropped: int = 0) -> None:
        """Send the heartbeat, or the `Hello` until the broker has registered this worker.

        Call it when `heartbeat` is due. `num_dropped`: dropped messages of other sockets.
        """
        sent = self.send(self._counted(heartbeat, num_dropped)) if self.registered else self._say_hello()
        if not sent:
            self.registered = False
            self._warn()

    def _say_hello(self) -> bool:
        self._num_hellos += 1
        if self._num_hellos == HELLOS_UNTIL_TOLD and not self.num_welcomes:
            self._tell(f"waiting for the broker at {self.endpoint} (specq broker starts one)")
        return self.send(self.hello)

    def _counted(self, heartbeat: Heartbeat, num_dropped: int) -> Heartbeat:
        """Return the heartbeat with the counts of this link."""
        counts = {"reconnects": self.num_welcomes - 1, "messages_dropped": self.num_dropped + num_dropped}
        return replace(heartbeat, metrics=heartbeat.metrics | counts)

    def _warn(self) -> None:
        if time.monotonic() - self._warned_at > 5:
            self._warned_at = time.monotonic()
            hint = "start one: specq broker; with --keys it needs the public key of this process"
            reason = why_unreachable(self.endpoint)
            log.warning(
                "broker_connection_failed", broker=self.endpoint, **({"reason": reason} if reason else {}), hint=hint
            )
            choose_family(self.socket, self.endpoint)
