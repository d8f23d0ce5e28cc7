"""What a kind of journal must do, and the table of the kinds that there are.

A kind is a class with the constructor and the methods of `Journal`. To add one: a package beside `sqlite`, a line in
`JOURNALS`, and a line in `tests/journal/kinds.py`, so that the conformance suite runs over it.

The journal's time: the only time that is stored and compared. It never decreases, and no wall clock moves it.

    journal time = the monotonic clock + an offset, which each broker finds when it opens the journal

It begins near the seconds since 1970. It counts while a broker runs, and between two brokers as long as the machine is
up: the journal notes the time together with the machine's uptime. After a reboot it goes on from the last note, so that
at most NOTE_S are lost. Where the system does not name its boots (Linux does), each start of a broker counts as a boot.

Rule: no time in a journal is later than the journal's time when a broker opens it; later ones are brought back to that
(`specq.journal.sqlite.connection`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from specq.journal.records import JobSummary, Record, StoredJob
from specq.runtime import resolve

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


EPOCHS = 1 << 32  # epochs that one owner may use; the next owner's lie above them
JOURNALS = {
    "sqlite": "specq.journal.sqlite.store:SqliteJournal",
}


class Opening(NamedTuple):
    """How a broker opens a journal.

    durability  "full": a group that is written survives the loss of power; "process": the death of the process only
    owner       describes this broker to others that want the same journal
    floor       the epochs shall lie above this
    take_over   become the owner even if another broker, alive, is the owner
    clocks      the system's clocks, from which the journal's time goes on; None: they are read
    """

    durability: str = "full"
    owner: str = ""
    floor: int = 0
    take_over: bool = False
    clocks: Clocks | None = None


class Kept(NamedTuple):
    """What one step of keeping a journal to its limit did.

    num_forgotten  results that were forgotten
    is_full        the journal is beyond its limit, and holds nothing that may be forgotten
    """

    num_forgotten: int
    is_full: bool


class JournalReader(Protocol):
    """Looks things up while the owner writes, and does not delay it. One thread at a time; it may be another than the
    owner's.

    Each method raises JournalBusyError for what cannot be read now.
    """

    def find(self, job_id: int) -> StoredJob | None:
        """Return a job, or None if it is not in the journal; without its tokens if it has not ended."""

    def finished(self, limit: int, skip: int = 0, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the jobs that ended, the last one first; only the jobs of `owner`, unless it is None."""

    def close(self) -> None:
        """Release what the reader holds."""


class Journal(Protocol):
    """An open journal and its ownership. One thread at a time.

    A journal has one owner. Each new owner raises a number, the fence; an owner whose fence is not the newest writes
    nothing any more.

    address  what was opened, for log lines
    epoch    the owner's epochs lie above this, and above all epochs of its predecessors (`EPOCHS` for each)
    is_old   another broker owned the journal before
    offset   the journal's time is the monotonic clock + this (`specq.journal.interface.offset_of`)
    """

    address: str
    epoch: int
    is_old: bool
    offset: float

    def __init__(self, address: str, opening: Opening) -> None:
        """Open a journal, make it if there is none, and become its owner.

        Raises ConfigError if it cannot be used, is of a later version, or belongs to a living broker (unless
        `take_over`): then the message says "in use by another broker", names the owner, and `--take-over`.
        """

    def write(self, records: Sequence[Record]) -> None:
        """Journal a group of records, whole or not at all, in their order.

        Raises JournalBusyError if that cannot be done now (the same group may be written later), JournalLostError if
        the journal has another owner ("another broker").
        """

    def check(self) -> None:
        """Raise JournalLostError if the journal has another owner, JournalBusyError if that cannot be read."""

    def unfinished(self) -> list[StoredJob]:
        """Return the jobs that have not ended, oldest first, with all their tokens; raises ConfigError if one is
        unreadable."""

    def keep_to(self, most_bytes: int, before: float = 0.0) -> Kept:
        """Forget results that ended before then, and the oldest while the journal takes more bytes: one small step."""

    def note_time(self, noted: Noted) -> None:
        """Note the journal's time: the next owner goes on from there. Raises as `write` does."""

    def give_back(self, most_bytes: int, *, idle: bool) -> bool:
        """Return free room to the file system, one small step; False if nothing was done. `idle`: nothing else
        waits."""

    def reader(self) -> JournalReader:
        """Return a new reader of the same journal."""

    def close(self) -> None:
        """Release the journal, so that another broker can have it."""


def open_journal(address: str, opening: Opening) -> Journal:
    """Return the journal at an address, as its owner: KIND://... is of that kind, a path is a SQLite file."""
    scheme, separator, _ = address.partition("://")
    journal: Journal = resolve("kind of journal", JOURNALS, scheme if separator else "sqlite")(address, opening)
    return journal
