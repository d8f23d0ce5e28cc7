"""What a worker does before it is ready, and who of a group is, as lines for whoever waits in front of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

import click

NOTICED_S = 0.1  # waited for less than that
EVERY_S = 5.0  # between two lines about those that are not ready

Tell = Callable[[str], object]


def teller(name: str, *, wanted: bool) -> Tell:
    """Return what says what a worker does now: on standard output if that is `wanted`, else on standard error if that
    is a terminal."""
    if not wanted and not sys.stderr.isatty():
        return bool
    return lambda what: click.echo(f"{name}: {what}", err=not wanted)


class Readiness:
    """Says who has become ready, and every few seconds for whom the group waits. Times in seconds."""

    def __init__(self, names: Collection[str], tell: Tell, started: float) -> None:
        self._missing, self._tell, self._started = list(names), tell, started
        self._told = started

    def note(self, ready: Collection[str], now: float) -> bool:
        """Take the names of those that are ready by now; True if all are. Of one that nobody waited for nothing is
        said."""
        elapsed = now - self._started
        for name in [name for name in self._missing if name in ready]:
            self._missing.remove(name)
            if elapsed >= NOTICED_S:
                self._tell(f"{name}: ready after {elapsed:.1f} s")
        if self._missing and now >= self._told + EVERY_S:
            self._told = now
            self._tell(f"waiting for {', '.join(self._missing)}: {elapsed:.0f} s so far")
        return not self._missing
