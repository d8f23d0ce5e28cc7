"""What a kind of journal must do, and the table of the kinds that there are.

A kind is a class with the constructor and the methods of `Journal`. To add one: a package beside `sqlite`, a line in
`JOURNALS`, and a line in `tests/journal/kinds.py`, so that the conformance suite runs over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specq.journal.clock import Clocks, Noted
from specq.journal.records import JobSummary, Record, StoredJob
from specq.runtime import resolve

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
    offset   the journal's time is the monotonic clock + this (`specq.journal.clock.offset_of`)
    """

    address: str
    epoch: int
    is_old: bool
    offset: float

    def __init__(self, address: str, opening: Opening) -> None:
        """Open a journal, make it if there is none, and become its owner.

        Raises ConfigError if it cannot be used, is of a later version, or belongs to a living broker (unless
        `take_over`).
        """

    def write(self, records: Sequence[Record]) -> None:
        """Journal a group of records, whole or not at all, in their order.

        Raises JournalBusyError if that cannot be done now (the same group may be written later), JournalLostError if
        the journal has another owner.
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
