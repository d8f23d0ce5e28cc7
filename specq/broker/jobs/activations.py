"""Hidden states on their way from a verifier to the drafter that asked for them.

Rules: they are passed on as they came, once their form was checked; they are the drafter's to read. None are sent to a
drafter that is silent, so that few wait for it. A verifier that sends some for a lane that is gone is told to send no
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specq.broker.effects import Send
from specq.broker.state import BrokerState
from specq.protocol import Activations, GetActivations, decode


class ActivationRelay:
    """The handler of hidden states."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state

    def take(self, verifier: bytes, frames: Sequence[bytes]) -> None:
        """Pass hidden states on to the drafter of their lane; raises ProtocolError for a malformed message."""
        message = cast("Activations", decode(frames))
        job = self.state.jobs.active.get(message.session_id)
        if job is None or not job.session.is_at(verifier, message.epoch):
            return
        lane = job.drafters.lanes.get(message.lane)
        if lane is None:
            stop = GetActivations(session_id=message.session_id, epoch=message.epoch, lane=message.lane)
            self.state.outbox.send_back(verifier, stop)
            return
        lane.is_fed = True
        drafter = self.state.workers.get(lane.drafter)
        if drafter is not None and self.state.clock.now - drafter.last_seen <= self.state.settings.quiet_s:
            self.state.outbox.add(Send("front", lane.drafter, list(frames)))
