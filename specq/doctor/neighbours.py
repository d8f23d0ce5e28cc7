"""What else this machine does while the doctor measures: how many processors other processes use, and whether specq runs here already.

Rule: unknown is None, never a guess; where the system does not count seconds by processor, the load average of the last minute stands for them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from specq.bench.calibrate.usage import busy_s

PROC = Path("/proc")
ROLES = ("broker", "worker", "serve")


class Neighbours:
    """Others, from now on."""

    def __init__(self, cores: Sequence[int], proc: Path = PROC) -> None:
        self._cores, self._proc = cores, proc
        self._began, self._own_s = time.monotonic(), own_seconds()
        self._busy_s = busy_seconds(cores, proc)
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None

    def used(self) -> float | None:
        """Return how many of the processors other processes have used so far, as a mean; None where nothing says it."""
        busy_s, wall_s = busy_seconds(self._cores, self._proc), time.monotonic() - self._began
        if busy_s is None or self._busy_s is None or wall_s <= 0:
            return None if self._load is None else min(self._load, float(len(self._cores)))
        others_s = busy_s - self._busy_s - (own_seconds() - self._own_s)
        return min(max(others_s / wall_s, 0.0), float(len(self._cores)))


def own_seconds() -> float:
    """Return the seconds of processors that this process, and children that have ended, have used."""
    return sum(os.times()[:4])


def busy_seconds(cores: Sequence[int], proc: Path = PROC) -> float | None:
    """Return the seconds for which these processors have worked since the start, for whomever; None where the system does not count them."""
    try:
        return busy_s(cores, proc / "stat")
    except (OSError, ValueError):
        return None


def running(proc: Path = PROC) -> str:
    """Return which processes of specq run here already, in words; "" for none, or where the system does not list processes."""
    found = Counter(role for arguments in _others(proc) if (role := role_of(arguments)))
    return ", ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in sorted(found.items()))


def _others(proc: Path) -> Iterator[list[str]]:
    for directory in proc.glob("[0-9]*"):
        if directory.name != str(os.getpid()):
            try:
                yield (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue


def role_of(arguments: Sequence[str]) -> str:
    """Return which part of specq a command line runs, one of ROLES, or ""."""
    at = next((i for i, word in enumerate(arguments[:4]) if Path(word).name == "specq"), None)
    follows = arguments[at + 1] if at is not None and at + 1 < len(arguments) else ""
    return follows if follows in ROLES else ""
