"""The clients that follow a job, and how much of it each was sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specq.broker.admission.roles import NOBODY, Shown

MAX_READERS = 8  # clients that follow one job
MAX_MISSED = 40  # ticks in a row at which a reader takes nothing, before the job is no longer sent to it


@dataclass(slots=True)
class JobReader:
    """One client that follows a job.

    sent        generated tokens that it was sent
    shown       the key that it came with
    info        it asks what the job is
    greeted     it knows that the job is taken
    missed      it did not take the last message: until the next tick nothing is sent to it
    num_missed  ticks in a row before which that happened
    """

    sent: int
    shown: Shown = NOBODY
    info: bool = False
    greeted: bool = False
    missed: bool = False
    num_missed: int = 0


class Readers:
    """The readers of one job, `by_client`; the one that came first is the first."""

    __slots__ = ("by_client",)

    def __init__(self) -> None:
        self.by_client: dict[bytes, JobReader] = {}

    def attach(self, client: bytes, have: int, shown: Shown = NOBODY, *, info: bool = False) -> None:
        """Let a client follow the job; of too many, the one that came first no longer does."""
        self.by_client.pop(client, None)
        self.by_client[client] = JobReader(have, shown, info)
        if len(self.by_client) > MAX_READERS:
            del self.by_client[next(iter(self.by_client))]

    def retain(self, is_allowed: Callable[[JobReader], bool]) -> None:
        """Drop the readers that are not allowed."""
        self.by_client = {client: reader for client, reader in self.by_client.items() if is_allowed(reader)}

    def note_undelivered(self, client: bytes, base_len: int) -> None:
        """Note that a client did not take tokens: they are sent again at the next tick, from the same position on."""
        reader = self.by_client.get(client)
        if reader is not None:
            reader.sent, reader.missed = min(reader.sent, base_len), True

    def next_tick(self) -> None:
        """Allow that each is sent again what it did not take; drop one that has taken nothing for long, it may attach
        again."""
        for client, reader in list(self.by_client.items()):
            reader.num_missed = reader.num_missed + 1 if reader.missed else 0
            reader.missed = False
            if reader.num_missed > MAX_MISSED:
                del self.by_client[client]
