"""The journal: the broker's durable record of jobs.

- `interface`: the written records (jobs, their tokens, their ends), and the values that are read back. Also the
  interface of a journal, the table of kinds, and the journal's time, which is stored with jobs.
- `threads`: the two threads that keep disk access out of the broker's loop.
- `sqlite/`: the journal in a SQLite file.

Input: groups of records. Output: unfinished jobs, finished ones by id, lists. To add a kind of journal, see
`interface`.

Rules: a group of records is journaled as a whole or not at all. Only the broker with the newest fence may write. Tokens
count by position, so writing tokens twice has no effect.
"""

from specq.journal.interface import (
    EPOCHS,
    NO_CRASHES,
    Clocks,
    Crashes,
    JobBound,
    JobCrashed,
    JobDropped,
    JobEnded,
    JobSummary,
    JobTaken,
    Journal,
    JournalReader,
    Kept,
    MachineClock,
    Noted,
    Opening,
    Record,
    StoredJob,
    TokensAdded,
    offset_of,
    open_journal,
    pack,
    read_clocks,
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
