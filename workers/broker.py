"""The broker's process: a Poller loop over one ROUTER and one DEALER a verifier (see docs/decisions/0001)."""

from __future__ import annotations

import time
from collections.abc import Iterable

import structlog
import zmq

from specq.broker.core import Broker
from specq.broker.state import Connect, Disconnect, Effect, Send
from specq.config import BrokerConfig
from specq.errors import ConfigError
from specq.sockets import bind_router, connect_dealer, drain, try_send
from workers.loop import Beat, Stop, calm_collector

log = structlog.get_logger(__name__)


class BrokerLoop:
    """Sockets around a `Broker`."""

    def __init__(self, config: BrokerConfig) -> None:
        self.context = zmq.Context()
        self.router, self.address = bind_router(self.context, config.bind)
        self.broker = Broker(
            incarnation=int(time.time()),
            heartbeat_ms=config.heartbeat_ms,
            liveness_ms=config.liveness_ms,
            max_jobs=config.max_jobs,
        )
        self.backs: dict[bytes, zmq.Socket[bytes]] = {}
        self.poller = zmq.Poller()
        self.poller.register(self.router, zmq.POLLIN)
        self.tick = Beat(max(config.heartbeat_ms // 2, 10))

    def turn(self) -> None:
        """Wait for messages or the next tick, and handle what there is."""
        ready = dict(self.poller.poll(self.tick.remaining_ms()))
        if self.router in ready:
            for identity, *frames in drain(self.router):
                self.apply(self.broker.from_front(identity, frames, time.monotonic()))
        for identity, socket in list(self.backs.items()):
            if socket in ready:
                for frames in drain(socket):
                    self.apply(self.broker.from_back(identity, frames, time.monotonic()))
        if self.tick.due():
            self.apply(self.broker.tick(time.monotonic()))

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carry out what the broker decided."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Connect):
                self._connect(effect)
            else:
                self._disconnect(effect)

    def _send(self, effect: Send) -> None:
        if effect.link == "front":
            sent = try_send(self.router, [effect.to, *effect.frames])
        else:
            socket = self.backs.get(effect.to)
            sent = socket is not None and try_send(socket, effect.frames)
        if not sent:
            self.broker.undelivered(effect)

    def _connect(self, effect: Connect) -> None:
        try:
            socket = connect_dealer(self.context, effect.endpoint, queue=True)
        except ConfigError as error:
            log.warning("verifier_unreachable", reason=str(error))
            return
        self.backs[effect.to] = socket
        self.poller.register(socket, zmq.POLLIN)

    def _disconnect(self, effect: Disconnect) -> None:
        socket = self.backs.pop(effect.to, None)
        if socket is not None:
            self.poller.unregister(socket)
            socket.close()

    def close(self) -> None:
        """Close all sockets; what is queued gets a moment to leave."""
        self.context.destroy()


def run(config: BrokerConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    stop = Stop()
    loop = BrokerLoop(config)
    log.info("broker_started", address=loop.address)
    calm_collector()
    try:
        while not stop:
            loop.turn()
    finally:
        loop.close()
    log.info("broker_stopped", **loop.broker.state.counts)
    return 0
