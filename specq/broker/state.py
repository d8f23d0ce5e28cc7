"""What the rooms of the broker share: its workers, its jobs, its counters, and the outbox."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from specq.broker.jobs import Jobs
from specq.broker.roster import Roster
from specq.messages import Message
from specq.wire import Frames, encode


class Send(NamedTuple):
    """Frames for a peer: over the ROUTER ("front"), or over the DEALER to a verifier ("back")."""

    link: str
    to: bytes
    frames: Frames


class Connect(NamedTuple):
    """Connect a DEALER to a verifier's endpoint."""

    to: bytes
    endpoint: str


class Disconnect(NamedTuple):
    """Close the DEALER to a verifier."""

    to: bytes


Effect = Send | Connect | Disconnect


class State:
    """The broker's memory.

    `incarnation` counts seconds (of the wall clock at the start, say): a later broker's epochs are greater than an
    earlier one's, as long as that opened fewer than 1024 sessions for each second that it lived.
    """

    def __init__(self, *, incarnation: int, heartbeat_ms: int, liveness_ms: int, max_jobs: int) -> None:
        self.heartbeat_ms, self.liveness_s, self.max_jobs = heartbeat_ms, liveness_ms / 1000, max_jobs
        self.roster, self.jobs = Roster(), Jobs()
        self.counts: Counter[str] = Counter()
        self._epoch = incarnation << 10
        self._outbox: list[Effect] = []

    def next_epoch(self) -> int:
        """Return an epoch above all that were used before."""
        self._epoch += 1
        return self._epoch

    def send_front(self, to: bytes, message: Message) -> None:
        """Send to a client or worker over the ROUTER."""
        self._outbox.append(Send("front", to, encode(message)))

    def send_back(self, to: bytes, message: Message) -> None:
        """Send to a verifier over its DEALER."""
        self._outbox.append(Send("back", to, encode(message)))

    def emit(self, *effects: Effect) -> None:
        self._outbox.extend(effects)

    def take_outbox(self) -> list[Effect]:
        """Return what was emitted since the last call."""
        effects, self._outbox = self._outbox, []
        return effects
