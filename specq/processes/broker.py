"""The broker's process: a Poller loop over one ROUTER and one DEALER per verifier (see docs/decisions/0001).

A separate thread writes the journal. It wakes the loop when records are on disk.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import structlog
import zmq

from specq.broker import Broker, Connect, Disconnect, Effect, Front, JournalLink, Send
from specq.config import BrokerConfig, broker_address, journal_address
from specq.protocol import ConfigError, JournalLostError
from specq.runtime import HealthFile, apply_cpu
from specq.transport import Beat, Stop, broker_identity, calm_collector, connect_dealer, drain, try_send

log = structlog.get_logger(__name__)


class BrokerLoop:
    """Sockets around a `Broker`."""

    def __init__(self, config: BrokerConfig) -> None:
        self.front = Front(config)
        address = journal_address(config)
        self.journal = JournalLink(address, config) if address else None
        self.broker = _make_broker(config, self.journal, self.front)
        self.backs: dict[bytes, zmq.Socket[bytes]] = {}
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        try:
            self.front.bind(self.context, self.poller)
            self.broker.state.address = broker_address(config, self.front.address)
            broker_identity(self.broker.state.address)  # an address that is too long is refused now
        except BaseException:
            self.close()
            raise
        self.router, self.address = self.front.router, self.front.address
        if self.journal is not None:
            self.poller.register(self.journal, zmq.POLLIN)
        self.health = HealthFile()
        self.tick = Beat(max(config.heartbeat_ms // 2, 10))
        self._turned = time.monotonic()

    def turn(self) -> None:
        """Wait for messages or the next tick, and handle them."""
        ready = dict(self.poller.poll(self.tick.remaining_ms()))
        self._note_pause(time.monotonic())
        for identity, frames, who in self.front.messages(ready):
            self.apply(self.broker.from_front(identity, frames, time.monotonic(), who))
        for identity, socket in list(self.backs.items()):
            if socket in ready:
                for frames in drain(socket):
                    self.apply(self.broker.from_back_lazily(identity, frames, time.monotonic()))
                self.apply(self.broker.deliver(time.monotonic()))
        if self.tick.due():
            self.front.tick()
            self.health.note("draining" if self.broker.state.closing else "ready")
            self.apply(self.broker.tick(time.monotonic()))
        if self.journal is not None:
            if self.journal.fileno() in ready:
                self.apply(self.journal.notify(self.broker, time.monotonic()))
            self.journal.flush()

    def _note_pause(self, now: float) -> None:
        """Report to the broker that this process itself stood still, for example because it was frozen."""
        pause, self._turned = now - self._turned, now
        if pause > self.broker.state.settings.liveness_s / 2:
            log.warning("broker_stood_still", seconds=round(pause, 1))
            self.broker.stood_still(pause, now)

    def apply(self, effects: Iterable[Effect]) -> None:
        """Execute the effects that the broker returned."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Connect):
                self._connect(effect)
            elif isinstance(effect, Disconnect):
                self._disconnect(effect)
            elif self.journal is not None:
                self.journal.take(effect)

    def _send(self, effect: Send) -> None:
        socket = self.backs.get(effect.to)
        if effect.link == "front" or (socket is None and self.broker.reaches_by_front(effect.to)):
            sent = try_send(self.router, [effect.to, *effect.frames])
        else:
            sent = socket is not None and try_send(socket, effect.frames)
        if sent:
            self.broker.note_sent(effect)
        else:
            self.broker.undelivered(effect)

    def _connect(self, effect: Connect) -> None:
        try:
            curve = self.front.curve_to(self.broker.state.roles.public_key(effect.to))
            identity = broker_identity(self.broker.state.address)
            socket = connect_dealer(self.context, effect.endpoint, queue=True, curve=curve, identity=identity)
        except ConfigError as error:
            log.warning("verifier_connection_failed", reason=str(error))
            return
        self.backs[effect.to] = socket
        self.poller.register(socket, zmq.POLLIN)

    def _disconnect(self, effect: Disconnect) -> None:
        socket = self.backs.pop(effect.to, None)
        if socket is not None:
            self.poller.unregister(socket)
            socket.close(0)  # drop unsent messages: the peer or its key is gone

    def serve(self, stop: Stop, drain_s: float) -> None:
        """Serve until `stop`. Running jobs then stay in the journal; without a journal they get `drain_s` to end."""
        try:
            while not stop:
                self.turn()
            self.broker.drain(time.monotonic())
            if self.journal is None:
                self._drain(stop, time.monotonic() + drain_s)
            else:
                self._unbind_jobs(stop)
        finally:
            self.close()

    def _drain(self, stop: Stop, end: float) -> None:
        while not self.broker.is_idle and time.monotonic() < end and not stop.asked_again:
            self.turn()
        self.apply(self.broker.give_up(time.monotonic()))

    def _unbind_jobs(self, stop: Stop) -> None:
        """Unbind the jobs of all verifiers that send a message within two heartbeats.

        A silent verifier may have crashed. The next broker detects that.
        """
        since, patience_s = time.monotonic(), 2 * self.broker.state.settings.heartbeat_ms / 1000
        while self.broker.awaits_verifiers(since) and time.monotonic() < since + patience_s and not stop.asked_again:
            self.turn()
        self.apply(self.broker.unbind_jobs(since, time.monotonic()))

    def close(self) -> None:
        """Write pending records, notify clients, and close all sockets. Queued messages get a moment to leave."""
        if self.journal is not None:
            self.journal.close()
            with contextlib.suppress(JournalLostError):
                self.apply(self.journal.notify(self.broker, time.monotonic()))
        self.context.destroy()


def _make_broker(config: BrokerConfig, journal: JournalLink | None, front: Front) -> Broker:
    """Return the broker with the jobs of its journal restored."""
    broker = Broker(
        incarnation=int(time.time()),
        heartbeat_ms=config.heartbeat_ms,
        liveness_ms=config.liveness_ms,
        max_jobs=config.max_jobs,
        has_journal=journal is not None,
        epoch=journal.journal.epoch if journal else 0,
        offset=journal.journal.offset if journal else 0.0,
        drafters_per_job=config.drafters_per_job,
        grants=front.grants,
        weights_wait_s=config.weights_wait_seconds,
        traced_at_once=config.traced_jobs,
    )
    if journal is not None:
        broker.restore(journal.taken, time.monotonic())
        journal.taken = []
        broker.list_brokers(journal.brokers, time.monotonic())
    return broker


def run(config: BrokerConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    stop = Stop()
    HealthFile().begin()
    apply_cpu(config.cores, threads=1)
    loop = BrokerLoop(config)
    journal = loop.journal.journal.address if loop.journal else "none"
    log.info("broker_started", address=loop.address, journal=journal, jobs=len(loop.broker.state.jobs.active))
    calm_collector()
    loop.serve(stop, config.drain_seconds)
    log.info("broker_stopped", **loop.broker.state.counts)
    return 0
