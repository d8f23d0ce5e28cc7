"""The journal's time: the only time that is stored and compared. It never decreases, and no wall clock moves it.

    journal time = the monotonic clock + an offset, which each broker finds when it opens the journal

It begins near the seconds since 1970. It counts while a broker runs, and between two brokers as long as the machine is
up: the journal notes the time together with the machine's uptime. After a reboot it goes on from the last note, so that
at most NOTE_S are lost. Where the system does not name its boots (Linux does), each start of a broker counts as a boot.

Rule: no time in a journal is later than the journal's time when a broker opens it; later ones are brought back to that
(`specq.journal.sqlite.times`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

NOTE_S = 60.0  # between two notes of the time
_BOOT, _UPTIME = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/uptime")


class MachineClock(NamedTuple):
    """How long the machine has been up, in seconds, since which boot ("": unknown)."""

    boot: str
    uptime: float


class Clocks(NamedTuple):
    """What the clocks say, in seconds: the monotonic one, the wall clock (since 1970), and the machine's uptime."""

    monotonic: float
    wall: float
    machine: MachineClock


class Noted(NamedTuple):
    """A note in a journal: its time, and where the machine was then."""

    time: float
    machine: MachineClock


def read_clocks() -> Clocks:
    """Return what the system's clocks say now."""
    return Clocks(time.monotonic(), time.time(), read_machine())


def read_machine() -> MachineClock:
    """Return the machine's boot and uptime; of the kernel, since processes may be run with other clocks."""
    try:
        return MachineClock(_BOOT.read_text("ascii").strip(), float(_UPTIME.read_text("ascii").split()[0]))
    except (OSError, ValueError, IndexError):
        return MachineClock("", 0.0)


def offset_of(clocks: Clocks, noted: Noted | None, newest: float) -> float:
    """Return the offset of the journal's time for a broker that starts now.

    noted   None: the journal is new, or of a version that stored times of the wall clock. Its time goes on from the
            newest of them, or from now, whichever is earlier: so nothing in it is taken for older than it is
    newest  the newest time stored with a job; 0: there is none
    """
    if noted is None:
        return min(newest or clocks.wall, clocks.wall) - clocks.monotonic
    return noted.time + _up_between(noted.machine, clocks.machine) - clocks.monotonic


def _up_between(before: MachineClock, now: MachineClock) -> float:
    """Return how long the machine was up between two moments, as far as that is known.

    Of a container the uptime may begin anew in the same boot.
    """
    return max(0.0, now.uptime - before.uptime) if now.boot and now.boot == before.boot else 0.0
