"""A line between two processes, one way: when does what is sent now arrive?

No I/O and no clock: times are arguments, so that the simulator and bench.delay_proxy delay by the same rule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from specq.protocol import ConfigError


@dataclass(frozen=True, slots=True)
class LineSettings:
    """How a line delays and loses messages.

    delay_s       one way; jitter_s: mean of an exponentially distributed addition to it
    bytes_per_s   a message waits until those before it have left; 0: unlimited
    loss, double  chance that a message is lost, or arrives twice
    in_order      as TCP: nothing overtakes what was sent before it
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    double: float = 0.0
    in_order: bool = True

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a finite number, at least 0")
        for name in ("loss", "double"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a chance, from 0 to 1")


class DelayLine:
    """One direction of a connection."""

    __slots__ = ("_busy_until", "_last", "_random", "num_bytes", "num_lost", "num_messages", "settings")

    def __init__(self, settings: LineSettings, seed: int | str = 0) -> None:
        """`seed` keys jitter, loss and doubling."""
        self.settings = settings
        self.num_messages = self.num_bytes = self.num_lost = 0
        self._random = random.Random(seed)
        self._busy_until = 0.0  # the last message's last byte has left
        self._last = 0.0  # the last arrival

    def arrivals(self, now: float, num_bytes: int) -> list[float]:
        """Return when a message that is sent now arrives: once, twice, or never; in order of asking."""
        settings = self.settings
        self.num_messages += 1
        self.num_bytes += num_bytes
        if settings.bytes_per_s:
            self._busy_until = max(now, self._busy_until) + num_bytes / settings.bytes_per_s
            now = self._busy_until
        if settings.loss and self._random.random() < settings.loss:
            self.num_lost += 1
            return []
        copies = 2 if settings.double and self._random.random() < settings.double else 1
        return [self._arrival(now) for _ in range(copies)]

    def _arrival(self, left: float) -> float:
        settings = self.settings
        time = left + settings.delay_s
        if settings.jitter_s:
            time += self._random.expovariate(1 / settings.jitter_s)
        if settings.in_order:
            self._last = time = max(time, self._last)
        return time
