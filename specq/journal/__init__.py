"""The journal: what the broker must not forget.

    interface      what a kind of journal must do, and the table of kinds; its time, which is stored with jobs
    records        what is written: jobs, their tokens, their ends; and what is read back
    threads        the two threads that keep the disk out of the broker's loop
    sqlite/        the journal in a SQLite file

In: groups of records. Out: unfinished jobs, finished ones by id, lists. To add a kind of journal: see `interface`.

Rules: a group of records is journaled whole or not at all, and only by the broker whose fence is the newest. Tokens
count by position, so tokens that are written twice change nothing.
"""

from specq.journal.interface import (
    EPOCHS,
    Clocks,
    Journal,
    JournalReader,
    Kept,
    MachineClock,
    Noted,
    Opening,
    offset_of,
    open_journal,
    read_clocks,
)
from specq.journal.records import (
    NO_CRASHES,
    Crashes,
    JobBound,
    JobCrashed,
    JobDropped,
    JobEnded,
    JobSummary,
    JobTaken,
    Record,
    StoredJob,
    TokensAdded,
    pack,
    unpack,
)
from specq.journal.threads import JournalLookup, JournalWriter, Keep, Question

__all__ = [
    "EPOCHS",
    "NO_CRASHES",
    "Clocks",
    "Crashes",
    "JobBound",
    "JobCrashed",
    "JobDropped",
    "JobEnded",
    "JobSummary",
    "JobTaken",
    "Journal",
    "JournalLookup",
    "JournalReader",
    "JournalWriter",
    "Keep",
    "Kept",
    "MachineClock",
    "Noted",
    "Opening",
    "Question",
    "Record",
    "StoredJob",
    "TokensAdded",
    "offset_of",
    "open_journal",
    "pack",
    "read_clocks",
    "unpack",
]
