"""What the broker wants done: effects, which its components put into the outbox and its process carries out."""

from __future__ import annotations

from typing import NamedTuple

from specq.journal import Record
from specq.protocol import Frames, Message, encode


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


class Write(NamedTuple):
    """Journal a record; `Broker.journaled` takes its sequence number once it is there."""

    sequence: int
    record: Record


class Find(NamedTuple):
    """Look for a job in the journal; `Broker.found` takes the answer."""

    job_id: int


class FindFinished(NamedTuple):
    """Look for the last `limit` jobs of an owner (None: of all) that ended, but for the last `skip`; `Broker.listed`
    takes the answer."""

    client: bytes
    limit: int
    skip: int
    owner: str | None = None


Effect = Send | Connect | Disconnect | Write | Find | FindFinished


class Outbox:
    """The effects of the message or tick that is being handled, in their order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def send_front(self, to: bytes, message: Message) -> None:
        """Send to a client or worker over the ROUTER."""
        self._effects.append(Send("front", to, encode(message)))

    def send_back(self, to: bytes, message: Message) -> None:
        """Send to a verifier over its DEALER."""
        self._effects.append(Send("back", to, encode(message)))

    def add(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def take(self) -> list[Effect]:
        """Return what was added since the last call."""
        effects, self._effects = self._effects, []
        return effects
