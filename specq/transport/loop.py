"""What the main loop of each process needs: a flag that signals set, and a timer."""

from __future__ import annotations

import gc
import signal
import time
from types import FrameType


def calm_collector() -> None:
    """Run Python's cycle collector rarely: it took a third of a broker's time, and there are hardly any cycles.

    Call it after everything long-lived has been made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class Stop:
    """True once the process was asked to stop (SIGTERM, SIGINT); `asked_again`: it must not drain.

    While `at_once` is set, a signal ends the process at once, with status 0: there is nothing yet that could be lost.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.asked = self.asked_again = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.at_once:
            raise SystemExit(0)
        self.asked, self.asked_again = True, self.asked

    def __bool__(self) -> bool:
        return self.asked


class Beat:
    """A timer for something periodic."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_s = interval_ms / 1000
        self._next = time.monotonic()

    def due(self) -> bool:
        """Return True once in each interval."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.interval_s
        return True

    def remaining_ms(self) -> int:
        """Return the milliseconds until it is due, at least 0."""
        return max(0, int((self._next - time.monotonic()) * 1000) + 1)
