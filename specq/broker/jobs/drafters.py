"""Who drafts for a job: a lane for each drafter, what that may still send, and the verdicts that it has not received
yet."""

from __future__ import annotations

from dataclasses import dataclass

from specq.broker.admission.bucket import Bucket
from specq.broker.jobs.session import HeartbeatMark
from specq.protocol import LEAST_OWN_LANE


@dataclass(slots=True)
class DrafterLane:
    """A drafter's place at a job; `budget`: what it may still send, see `specq.broker.admission.limits` (None: all).
    `is_fed`: whether hidden states for it have passed since its last heartbeat."""

    drafter: bytes
    mark: HeartbeatMark
    budget: Bucket | None = None
    is_fed: bool = False


@dataclass(slots=True)
class HeldVerdicts:
    """Verdicts that drafters have not received yet: see `specq.broker.jobs.relay`.

    since   the committed length at which they begin, -1 if there are none; count: how many; most: how many go as one
    asked   `min_accept_prob` of the newest verdict, held back or not
    """

    since: int = -1
    count: int = 0
    most: int = 1
    asked: int = 0


class Drafters:
    """The drafters of one job. A drafter that is added again gets a new lane, since it drafts from a new beginning."""

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
        """Return the lane of a drafter; None if it has none."""
        return next((lane for lane in self.lanes.values() if lane.drafter == drafter), None)

    def add(self, drafter: bytes, length: int) -> int:
        """Give a drafter a lane, from a committed length on; return its number."""
        self.drop(drafter)
        number, self._next_lane = self._next_lane, (self._next_lane + 1) % LEAST_OWN_LANE
        self.lanes[number] = DrafterLane(drafter, HeartbeatMark(length))
        return number

    def drop(self, drafter: bytes) -> None:
        self.lanes = {number: lane for number, lane in self.lanes.items() if lane.drafter != drafter}

    def clear(self) -> None:
        self.lanes = {}
