"""The journal: the broker's durable record of jobs.

- `records`: what is written (jobs, their tokens, their ends), and the values that are read back.
- `interface`: the interface of a journal, the table of kinds, and the journal's time, which is stored with jobs.
- `threads`: the two threads that keep disk access out of the broker's loop.
- `transfer`: copies a journal to another one. `check`: finds what is wrong in one.
- `rows`: records as rows of tables, and back, for all kinds.
- `sqlite/`: the journal in a SQLite file, for one broker.
- `postgres/`: the journal in a PostgreSQL database, for several brokers.

Input: groups of records. Output: unfinished jobs, finished ones by id, lists. To add a kind of journal, see
`interface`.

Rules: a group of records is journaled as a whole or not at all. The records of a job are written for its holder only.
Tokens count by position, so writing tokens twice has no effect.
"""

from specq.journal.check import JournalReport, check_journal
from specq.journal.interface import (
    EPOCHS,
    HELD_S,
    LEASE_S,
    MOST_TAKEN,
    SILENT_S,
    Clocks,
    Journal,
    JournalReader,
    Kept,
    MachineClock,
    Noted,
    Opening,
    kind_of,
    offset_of,
    open_journal,
    read_clocks,
    take_all,
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
from specq.journal.threads import (
    IN_A_ROW,
    RENEW_S,
    TAKE_S,
    BrokersListed,
    JobsGained,
    JobsLost,
    JournalEvent,
    JournalLookup,
    JournalWriter,
    Keep,
    Question,
    TakingRule,
)
from specq.journal.transfer import Copied, copy_journal

__all__ = [
    "EPOCHS",
    "HELD_S",
    "IN_A_ROW",
    "LEASE_S",
    "MOST_TAKEN",
    "NO_CRASHES",
    "RENEW_S",
    "SILENT_S",
    "TAKE_S",
    "BrokersListed",
    "Clocks",
    "Copied",
    "Crashes",
    "JobBound",
    "JobCrashed",
    "JobDropped",
    "JobEnded",
    "JobSummary",
    "JobTaken",
    "JobsGained",
    "JobsLost",
    "Journal",
    "JournalEvent",
    "JournalLookup",
    "JournalReader",
    "JournalReport",
    "JournalWriter",
    "Keep",
    "Kept",
    "MachineClock",
    "Noted",
    "Opening",
    "Question",
    "Record",
    "StoredJob",
    "TakingRule",
    "TokensAdded",
    "check_journal",
    "copy_journal",
    "kind_of",
    "offset_of",
    "open_journal",
    "pack",
    "read_clocks",
    "take_all",
    "unpack",
]
