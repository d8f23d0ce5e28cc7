"""The journal: its interface, its time, and the table of its kinds.

Several brokers may use a journal, if its kind is for that. Each unfinished job belongs to one of them, its holder. A
holder lets its lease be renewed all the time. When the lease has run out, by the journal's clock, another broker takes
the jobs. The records of a job are written for its holder only. The journal checks that in the transaction that writes
them.

A kind is a class with the constructor and the methods of `Journal`. To add one, write a package beside `sqlite`. Add a
line in `JOURNALS`. Add a line in `tests/journal/kinds.py` to run the conformance suite over it.

The journal's time is the only time that is stored and compared. It never decreases, and changes of the wall clock do
not affect it.

    journal time = the monotonic clock + an offset, which each broker finds when it opens the journal

It begins near the seconds since 1970. It advances while a broker runs, and between two brokers while the machine is up.
For that the journal notes the time together with the machine's uptime. After a reboot it continues from the last note.
So at most NOTE_S seconds are lost. Linux names its boots. On other systems, each start of a broker counts as a boot.

Rule: when a broker opens a journal, no stored time is after the journal's time. Later times are corrected to that
(`specq.journal.sqlite.connection`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from specq.journal.records import JobSummary, Record, StoredJob
from specq.protocol import ConfigError
from specq.runtime import resolve

NOTE_S = 60.0  # seconds between two notes of the time
_BOOT, _UPTIME = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/uptime")


class MachineClock(NamedTuple):
    """The machine's uptime in seconds, and its boot. "": unknown boot."""

    boot: str
    uptime: float


class Clocks(NamedTuple):
    """Clock readings in seconds: the monotonic clock, the wall clock (since 1970), and the machine's uptime."""

    monotonic: float
    wall: float
    machine: MachineClock


class Noted(NamedTuple):
    """A note in a journal: its time, and the machine's boot and uptime at that moment."""

    time: float
    machine: MachineClock


def read_clocks() -> Clocks:
    """Return the present readings of the system's clocks."""
    return Clocks(time.monotonic(), time.time(), read_machine())


def read_machine() -> MachineClock:
    """Return the machine's boot and uptime, from the kernel, since processes may have other clocks."""
    try:
        return MachineClock(_BOOT.read_text("ascii").strip(), float(_UPTIME.read_text("ascii").split()[0]))
    except (OSError, ValueError, IndexError):
        return MachineClock("", 0.0)


def offset_of(clocks: Clocks, noted: Noted | None, newest: float) -> float:
    """Return the offset of the journal's time for a broker that starts now.

    - `noted`: None if the journal is new, or of a version that stored wall-clock times. Its time then continues from
      the newest such time, or from now, whichever is earlier. So no stored job appears older than it is.
    - `newest`: the newest time stored with a job. 0: none.
    """
    if noted is None:
        return min(newest or clocks.wall, clocks.wall) - clocks.monotonic
    return noted.time + _up_between(noted.machine, clocks.machine) - clocks.monotonic


def _up_between(before: MachineClock, now: MachineClock) -> float:
    """Return how long the machine was up between two moments, if known.

    The uptime of a container may restart within the same boot.
    """
    return max(0.0, now.uptime - before.uptime) if now.boot and now.boot == before.boot else 0.0


EPOCHS = 1 << 32  # epochs that a holder may use for a job; the next holder's are above them
LEASE_S = 3.0  # without a renewal or a written group, until other brokers take a broker's jobs
SILENT_S = 2.5  # the same, if the broker has no connection to the journal: its process ended
HELD_S = 2.0  # after a renewal, a broker can be sure of its jobs; a failover may forget the renewals of a second
MOST_TAKEN = 256  # jobs at once, so that several brokers share those of a lost one
JOURNALS = {
    "sqlite": "specq.journal.sqlite.store:SqliteJournal",
    "postgresql": "specq.journal.postgres.store:PostgresJournal",
}


class Opening(NamedTuple):
    """How a broker opens a journal.

    - `durability`: "full": a written group survives the loss of power. "process": it survives only the death of the
      process.
    - `owner`: describes this broker to others that open the same journal.
    - `address`: where clients and workers reach this broker.
    - `floor`: the epochs must be above this.
    - `take_over`: become the owner even if another live broker is the owner.
    - `clocks`: the readings from which the journal's time continues. None: read the system's clocks.
    """

    durability: str = "full"
    owner: str = ""
    address: str = ""
    floor: int = 0
    take_over: bool = False
    clocks: Clocks | None = None


class Kept(NamedTuple):
    """The result of one step that keeps a journal within its limit.

    - `num_forgotten`: number of results that were forgotten.
    - `is_full`: the journal exceeds its limit, and every job in it is still needed.
    """

    num_forgotten: int
    is_full: bool


class JournalReader(Protocol):
    """Reads the journal while brokers write, without delaying them.

    One thread at a time, which may differ from the writer's. Each method raises JournalBusyError if the journal cannot
    be read now.
    """

    def find(self, job_id: int) -> StoredJob | None:
        """Return a job, or None if it is not in the journal. An unfinished job comes without its tokens."""

    def finished(self, limit: int, skip: int = 0, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the ended jobs, newest first. None as `owner`: the jobs of all owners."""

    def unfinished(self, limit: int, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the oldest unfinished jobs of all brokers. `owner` as in `finished`."""

    def close(self) -> None:
        """Release the reader's resources."""


class Journal(Protocol):
    """A journal that a broker has opened. One thread at a time.

    - `address`: the opened address, for log lines. Without passwords.
    - `epoch`: the epochs of the broker's new jobs are the next `EPOCHS` above this. No other broker has these.
    - `offset`: the journal's time is the monotonic clock + this (`specq.journal.interface.offset_of`).
    """

    address: str
    epoch: int
    offset: float

    def __init__(self, address: str, opening: Opening) -> None:
        """Open a journal, create it if necessary, and begin the broker's lease.

        Raises ConfigError if it cannot be used, or is of a later version. A kind for one broker also raises it if a
        live broker has opened the journal (unless `take_over`). The message then has "in use by another broker", the
        owner's name, and `--take-over`.
        """

    def write(self, records: Sequence[Record]) -> frozenset[int]:
        """Journal a group of records in order. Return the jobs that this broker does not hold.

        The records of these jobs are left out. All others are written as a whole or not at all. `JobTaken` makes the
        broker the holder, unless another broker holds a job with this id, or the job has ended.

        Raises JournalBusyError if that is impossible now, or if it is not known whether the group was written. The same
        group is then written again, which has no further effect. Raises JournalLostError if this broker can never write
        again, since the journal is for one broker and has another one ("another broker").
        """

    def write_all(self, groups: Iterable[Sequence[Record]]) -> Iterator[frozenset[int]]:
        """Write groups in order, and yield what `write` returns for each. The next group may be asked for before that.

        Raises as `write` does. All groups without an answer are then written again, in order.
        """
        return map(self.write, groups)

    def renew(self) -> tuple[str, ...]:
        """Renew the broker's lease, for `LEASE_S` seconds. Return the addresses of all live brokers, with its own.

        Empty if the journal is for one broker. Raises as `write` does.
        """

    def lost(self) -> frozenset[int]:
        """Return the jobs that this broker lost while its lease was not renewed in time. Call it after `renew`.

        Each job is returned once. Raises as `write` does.
        """

    def take(self) -> list[StoredJob]:
        """Become the holder of unfinished jobs that no live broker holds. Return them with all their tokens.

        Oldest first, at most `MOST_TAKEN` if the journal is for several brokers. Their `epoch` is determined in the
        same transaction. Raises as `write` does. An unreadable job raises ConfigError if the journal is for one broker.
        In a journal for several, it is logged and left alone.
        """

    def unfinished(self) -> list[StoredJob]:
        """Return the unfinished jobs of all brokers, oldest first, with all their tokens.

        Raises ConfigError if one is unreadable.
        """

    def keep_to(self, most_bytes: int, before: float = 0.0) -> Kept:
        """Do one small step: forget results from before `before`, and the oldest while the journal is too large.

        `most_bytes`: the limit of the journal. Several brokers may do so at the same time.
        """

    def note_time(self, noted: Noted) -> None:
        """Note the journal's time, from which the next broker continues. Raises as `write` does."""

    def give_back(self, most_bytes: int, *, idle: bool) -> bool:
        """Return free space to the file system in one small step.

        `idle`: without other work. False: no step was needed.
        """

    def reader(self) -> JournalReader:
        """Return a new reader of the same journal."""

    def close(self) -> None:
        """End the lease and release the journal. Other brokers may take the jobs at once."""


def open_journal(address: str, opening: Opening) -> Journal:
    """Return the journal at an address, as its owner. KIND://... is of that kind, a path is a SQLite file."""
    journal: Journal = resolve("kind of journal", JOURNALS, kind_of(address))(address, opening)
    return journal


def take_all(journal: Journal) -> list[StoredJob]:
    """Become the holder of all unfinished jobs that no live broker holds, and return them. Raises as `take` does."""
    taken = list[StoredJob]()
    while jobs := journal.take():
        taken += jobs
    return taken


def kind_of(address: str) -> str:
    """Return the kind of the journal at an address. Raises ConfigError for an address that is almost KIND://..."""
    scheme, separator, _ = address.partition("://")
    if not separator and (kind := address.partition(":")[0]) in JOURNALS:
        raise ConfigError(f"the journal's address is {address}; write {kind}://, or ./{address} for a file")
    return scheme if separator else "sqlite"
