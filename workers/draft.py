"""A draft worker's process: a link to the broker, and a `Drafter` that runs whenever there is something worth drafting."""

from __future__ import annotations

import os

import structlog
import zmq

from specq.config import DraftConfig, options_of
from specq.cpu import apply_cpu
from specq.drafter import Drafter
from specq.errors import ProtocolError
from specq.keys import curve_to_broker
from specq.messages import Hello
from specq.models import resolve_model
from specq.proposers import MODEL_FREE, PROPOSERS, Proposer
from specq.table import resolve
from workers.link import BrokerLink, new_incarnation
from workers.loop import Stop, calm_collector

log = structlog.get_logger(__name__)


class DrafterLoop:
    """Sockets around a `Drafter`."""

    def __init__(self, config: DraftConfig, drafter: Drafter, name: str) -> None:
        self.drafter = drafter
        self.context = zmq.Context()
        hello = Hello(role="draft", name=name, incarnation=drafter.incarnation, model=drafter.proposer.info)
        self.link = BrokerLink(self.context, config.broker, hello, curve_to_broker(config.keys, "draft"))
        self.num_dropped = 0

    def turn(self) -> None:
        """Hear what the broker says, run one pass if anything is worth drafting, beat if it is time."""
        wait_ms = 0 if self.drafter.has_work else self.link.heartbeat.remaining_ms()
        if self.link.socket.poll(wait_ms, zmq.POLLIN):
            self._receive()
        for draft in self.drafter.step():
            self.link.send(draft)
        if self.link.heartbeat.due():
            self.link.beat(self.drafter.heartbeat())

    def _receive(self) -> None:
        for message in self.link.receive():
            try:
                self.drafter.handle(message)
            except ProtocolError as error:
                self.num_dropped += 1
                log.debug("message_dropped", reason=str(error))

    def close(self) -> None:
        """Say good-bye, and close all sockets."""
        self.drafter.state = "leaving"
        self.link.beat(self.drafter.heartbeat())
        self.context.destroy()


def run(config: DraftConfig) -> int:
    """Draft until SIGTERM or SIGINT; return the exit status."""
    stop = Stop(at_once=True)
    apply_cpu(config.cores, config.threads, config.nice)
    name = config.name or f"draft-{os.getpid()}"
    model = config.model if config.proposer in MODEL_FREE else resolve_model(config.model, "draft")
    proposer: Proposer = resolve("proposer", PROPOSERS, config.proposer)(
        model,
        device=config.device,
        dtype=config.dtype,
        kv_slots=config.kv_slots,
        name=config.model,
        law_size=config.law_size,
        options=options_of(config),
    )
    drafter = Drafter(
        proposer,
        incarnation=new_incarnation(),
        width=config.width,
        fan_out=config.fan_out,
        max_ahead=config.max_ahead,
        chain=config.chain,
    )
    loop = DrafterLoop(config, drafter, name)
    log.info("drafter_ready", name=name, model=proposer.info.name)
    calm_collector()
    stop.at_once = False
    try:
        while not stop:
            loop.turn()
    finally:
        loop.close()
    log.info("drafter_stopped", name=name, passes=drafter.num_passes, dropped=loop.num_dropped)
    return 0
