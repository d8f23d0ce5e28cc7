"""A virtual clock and the queue of what is going to happen: one event at a time, in the order of time, then of
asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from specq.protocol import EngineError


class EventQueue:
    """Runs actions at their virtual times; `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0  # run so far
        self._num_asked = 0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action` at a time; what lies in the past happens now."""
        self._num_asked += 1
        heapq.heappush(self._events, (max(time, self.now), self._num_asked, action, arguments))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self._next()
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Let time pass until the condition holds; raises EngineError if it does not within the limit."""
        end = self.now + limit_s
        while not condition():
            if not self._events or self._events[0][0] > end:
                raise EngineError(f"what was waited for did not happen within {limit_s:g} s of virtual time")
            self._next()

    def _next(self) -> None:
        self.now, _, action, arguments = heapq.heappop(self._events)
        self.num_events += 1
        action(*arguments)
