"""How many lines are under way at a time: as many as the verifiers have room for, and a few that wait.

The room is not known: it depends on KV, sessions and the load of others. It follows from the broker's report. As long
as fewer than FEW jobs of a model wait, more lines begin: while none waits, half as many again. Where more wait, as many
fewer do. So lines fill what other requests leave.

The next place goes to the batch with the highest priority. Priorities that differ little count as equal (BAND). Of
equals, the owner with the fewest lines under way is next, then the longest wait decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FEW = 16  # jobs of a model that may wait in the broker
MOST = 1024  # lines of a gateway under way
BAND = 25  # priorities that count as equal


@dataclass(slots=True)
class _Waiting:
    """A batch that waits for a place for its next line."""

    owner: str
    model: str
    priority: Callable[[], int]
    place: asyncio.Future[None]


class LineRoom:
    """The places for lines, by model. A model that is not served shares the places of "" (no name)."""

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}
        self._under_way, self._of_owner = Counter[str](), Counter[str]()
        self._waiting: list[_Waiting] = []
        self._is_open = False  # whether lines may begin: not without a broker, or where results have no room

    @property
    def num_under_way(self) -> int:
        """The number of lines under way."""
        return self._under_way.total()

    def take_report(self, report: Mapping[str, Any]) -> None:
        """Adapt the places to a report of the broker."""
        loads, models = report.get("loads", {}), report.get("models", [])
        waiting = {model: load["waiting"] for model, load in loads.items()}
        self._limits = {model: self._limit(model, waiting.get(model, 0)) for model in models}
        self._limits[""] = self._limit("", max(waiting.values(), default=0))

    def open(self, *, is_open: bool) -> None:
        """Let lines begin, or not."""
        self._is_open = is_open
        self._grant()

    def _limit(self, model: str, num_waiting: int) -> int:
        under_way = self._under_way[model]
        spare = FEW if num_waiting else max(FEW, under_way // 2)
        return min(max(under_way + spare - num_waiting, FEW), MOST)

    def _known(self, model: str) -> str:
        return model if model in self._limits else ""

    async def take(self, owner: str, model: str, priority: Callable[[], int]) -> Callable[[object], None]:
        """Wait for a place. Return a callback that gives it back."""
        waiting = _Waiting(owner, model, priority, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            self._grant()
            await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():
                self._give_back(waiting)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        return lambda _: self._give_back(waiting)

    def _give_back(self, place: _Waiting) -> None:
        self._under_way[place.model] -= 1
        self._of_owner[place.owner] -= 1
        if not self._of_owner[place.owner]:
            del self._of_owner[place.owner]
        self._grant()

    def _grant(self) -> None:
        """Give free places to waiting lines."""
        while self._is_open and (able := [one for one in self._waiting if self._has_place(one)]):
            first = max(able, key=lambda one: (one.priority() // BAND, -self._of_owner[one.owner]))
            self._waiting.remove(first)
            first.model = self._known(first.model)
            self._under_way[first.model] += 1
            self._of_owner[first.owner] += 1
            first.place.set_result(None)

    def _has_place(self, waiting: _Waiting) -> bool:
        model = self._known(waiting.model)
        has_room = self._under_way[model] < self._limits.get(model, FEW)
        return has_room and self.num_under_way < MOST and not waiting.place.done()
