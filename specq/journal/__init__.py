"""The journal: what the broker must not forget.

    records        what it is given: jobs, their tokens, their ends; and what it gives back
    logprob_rows   log-probabilities as bytes
    threads        the two threads that keep the disk out of the broker's loop
    sqlite/        the journal in a SQLite file

In: groups of records. Out: unfinished jobs, finished ones by id, lists. To add a kind of journal: a package beside `sqlite`.

Rules: a group of records is journaled whole or not at all, and only by the broker whose fence is the newest. Whatever is
given twice changes nothing: tokens count by position.
"""

from specq.journal.logprob_rows import pack, unpack
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
)
from specq.journal.sqlite.reader import JournalReader
from specq.journal.sqlite.store import Journal
from specq.journal.threads import JournalLookup, JournalWriter, Keep, Question

__all__ = [
    "NO_CRASHES",
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
    "Question",
    "Record",
    "StoredJob",
    "TokensAdded",
    "pack",
    "unpack",
]
