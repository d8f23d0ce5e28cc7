"""The journal's time: the only time that is stored and compared. It never decreases, and no wall clock moves it.

    journal time = the monotonic clock + an offset

It begins near the seconds since 1970, and counts the seconds in which the machine is up and awake, whether a broker runs or not.
All brokers of one boot have the same offset. After a reboot the time goes on from the last that was noted in the journal: at most
NOTE_S of it are lost. Where the system does not name its boots, each start of a broker counts as a boot.

Rule: no time in a journal is later than the journal's time when a broker opens it; later ones are brought back to that
(`specq.journal.sqlite.times`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

NOTE_S = 60.0  # between two notes of the journal's time
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Reading(NamedTuple):
    """The system's clocks: seconds of the monotonic one, which `boot` it belongs to ("": unknown), seconds since 1970."""

    monotonic: float
    boot: str
    wall: float


class Noted(NamedTuple):
    """What a journal holds of its time: the offset, in which boot, and the latest time that was noted."""

    boot: str
    offset: float
    latest: float


def read_clocks() -> Reading:
    """Return what the system's clocks say now."""
    try:
        boot = _BOOT_ID.read_text("ascii").strip()
    except OSError:
        boot = ""
    return Reading(time.monotonic(), boot, time.time())


def offset_of(clocks: Reading, noted: Noted | None, newest: float) -> float:
    """Return the offset of the journal's time for a broker that starts now.

    noted   None: the journal is new, or of a version without journal time, which stored times of the wall clock. Its time goes
            on from the newest of them, or from now, whichever is earlier: so nothing in it is taken for older than it is
    newest  the newest time stored with a job; 0: there is none
    """
    if noted is None:
        start = min(newest or clocks.wall, clocks.wall)
    elif clocks.boot and clocks.boot == noted.boot:
        start = max(clocks.monotonic + noted.offset, noted.latest)
    else:
        start = noted.latest
    return start - clocks.monotonic
