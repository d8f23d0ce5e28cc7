"""The other peers of one job beside its verifier: clients that follow it, and drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specq.broker.state.rights import NOBODY, Bucket, Shown
from specq.protocol import LEAST_OWN_LANE

MAX_READERS = 8  # clients that follow one job
MAX_MISSED = 40  # ticks in a row without a message taken by a reader, before it is dropped


@dataclass(slots=True)
class JobReader:
    """One client that follows a job.

    - `sent`: number of generated tokens sent to it.
    - `shown`: the key that it came with.
    - `info`: it asks for a description of the job.
    - `greeted`: it knows that the broker has accepted the job.
    - `missed`: it did not take the last message. The broker sends it no more until the next tick.
    - `num_missed`: number of ticks in a row before which that happened.
    """

    sent: int
    shown: Shown = NOBODY
    info: bool = False
    greeted: bool = False
    missed: bool = False
    num_missed: int = 0


class Readers:
    """The readers of one job, `by_client`, in order of arrival."""

    __slots__ = ("by_client",)

    def __init__(self) -> None:
        self.by_client: dict[bytes, JobReader] = {}

    def attach(self, client: bytes, have: int, shown: Shown = NOBODY, *, info: bool = False) -> None:
        """Let a client follow the job. If there are too many, drop the first."""
        self.by_client.pop(client, None)
        self.by_client[client] = JobReader(have, shown, info)
        if len(self.by_client) > MAX_READERS:
            del self.by_client[next(iter(self.by_client))]

    def retain(self, is_allowed: Callable[[JobReader], bool]) -> None:
        """Drop the readers that are not allowed."""
        self.by_client = {client: reader for client, reader in self.by_client.items() if is_allowed(reader)}

    def note_undelivered(self, client: bytes, base_len: int) -> None:
        """Note that a client did not take tokens. They are sent again at the next tick, from the same position."""
        reader = self.by_client.get(client)
        if reader is not None:
            reader.sent, reader.missed = min(reader.sent, base_len), True

    def next_tick(self) -> None:
        """Allow each reader to receive again what it did not take.

        A reader that has not taken a message for long is dropped. It may attach again.
        """
        for client, reader in list(self.by_client.items()):
            reader.num_missed = reader.num_missed + 1 if reader.missed else 0
            reader.missed = False
            if reader.num_missed > MAX_MISSED:
                del self.by_client[client]


@dataclass(slots=True)
class HeartbeatMark:
    """The state of a session in its worker's last heartbeat.

    - `length`: the broker's committed length at that time. -1: no heartbeat has listed the session yet.
    - `is_missing`: the heartbeat lacked the session.
    """

    length: int = -1
    is_missing: bool = False

    def confirm(self, length: int) -> None:
        """Note that a heartbeat lists the session, at this committed length."""
        self.length, self.is_missing = length, False


@dataclass(slots=True)
class DrafterLane:
    """A drafter's place at a job.

    - `budget`: what it may still send, see `specq.broker.gate`. None: not used yet.
    - `is_fed`: the broker has forwarded hidden states to it since its last heartbeat.
    """

    drafter: bytes
    mark: HeartbeatMark
    budget: Bucket | None = None
    is_fed: bool = False


@dataclass(slots=True)
class HeldVerdicts:
    """Verdicts that drafters have not received yet: see `specq.broker.jobs.verdicts`.

    - `since`: the committed length at which they begin. -1: none are held.
    - `count`: number of held verdicts.
    - `most`: number of verdicts that go as one.
    - `asked`: `min_accept_prob` of the newest verdict, held back or not.
    """

    since: int = -1
    count: int = 0
    most: int = 1
    asked: int = 0


class Drafters:
    """The drafters of one job. A drafter that is added again gets a new lane, since it starts anew."""

    __slots__ = ("_next_lane", "held", "lanes")

    def __init__(self) -> None:
        self.lanes: dict[int, DrafterLane] = {}
        self.held = HeldVerdicts()
        self._next_lane = 0

    def __len__(self) -> int:
        return len(self.lanes)

    def identities(self) -> list[bytes]:
        return [lane.drafter for lane in self.lanes.values()]

    def lane_of(self, drafter: bytes) -> DrafterLane | None:
        """Return the lane of a drafter, or None."""
        return next((lane for lane in self.lanes.values() if lane.drafter == drafter), None)

    def add(self, drafter: bytes, length: int) -> int:
        """Give a drafter a lane from a committed length on, and return the lane's number."""
        self.drop(drafter)
        number, self._next_lane = self._next_lane, (self._next_lane + 1) % LEAST_OWN_LANE
        self.lanes[number] = DrafterLane(drafter, HeartbeatMark(length))
        return number

    def drop(self, drafter: bytes) -> None:
        self.lanes = {number: lane for number, lane in self.lanes.items() if lane.drafter != drafter}

    def clear(self) -> None:
        self.lanes = {}
