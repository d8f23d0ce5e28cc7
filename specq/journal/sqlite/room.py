"""How much room a journal takes, and how it is kept to its limit.

Everything counts: prompts, parameters, tokens, results, indexes, and what SQLite needs around them, as the pages that
are in use. What is forgotten is the results that ended first, with their prompts. The pages that they leave are used
again, and given back to the file system where the file is larger than its limit, or nothing else is to be done.

Rule: a step is small (`STEP_BYTES`, `GIVEN_BACK` pages), since groups of records wait for it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

STEP_ROWS = 200  # results that one step forgets at most
STEP_BYTES = 8 << 20  # and their bytes, about: more than a group of records adds
GIVEN_BACK = 512  # pages that one step gives back to the file system
SPARE = 256  # free pages that are kept for what comes next
MOST_WAL = 8 << 20  # bytes that the log keeps when it begins anew
_OLDEST = (
    "SELECT job_id, ended, num_bytes + length(prompt_ids) + length(params) FROM results JOIN jobs USING (job_id) "
    "ORDER BY ended LIMIT ?"
)


class Room(NamedTuple):
    """The pages of a journal, and how many of them are free."""

    num_pages: int
    num_free: int
    page_bytes: int

    @property
    def used_bytes(self) -> int:
        return (self.num_pages - self.num_free) * self.page_bytes

    @property
    def file_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def room(connection: sqlite3.Connection) -> Room:
    """Return how much room a journal takes."""
    return Room(*[_pragma(connection, name) for name in ("page_count", "freelist_count", "page_size")])


def oldest(connection: sqlite3.Connection, before: float, surplus: int) -> list[int]:
    """Return the results that one step shall forget: those that ended before then, and so many that there is no surplus
    of bytes any more."""
    found, freed = [], 0
    for job_id, ended, num_bytes in connection.execute(_OLDEST, (STEP_ROWS,)):
        if (ended >= before and freed >= surplus) or freed >= STEP_BYTES:
            break
        found.append(job_id)
        freed += num_bytes
    return found


def give_back(connection: sqlite3.Connection, path: Path, most_bytes: int, *, idle: bool) -> bool:
    """Give pages that are free back to the file system, some of them: if nothing else is to be done, else those beyond
    the limit. When there are none, and nothing else is to be done, the log is emptied into the file. False if nothing
    was done."""
    now = room(connection)
    num_surplus = now.num_free - SPARE if idle else (now.file_bytes - most_bytes) // now.page_bytes
    num_pages = min(GIVEN_BACK, now.num_free, num_surplus)
    if num_pages > 0:  # a script, since `execute` would take but the first step of it
        connection.executescript(f"PRAGMA incremental_vacuum({num_pages})")
        return True
    if idle and _size(path.with_name(path.name + "-wal")) > SPARE * now.page_bytes:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return False


def let_shrink(connection: sqlite3.Connection) -> None:
    """Let a file that cannot give pages back learn it, by writing it anew; one that can stays as it is."""
    if _pragma(connection, "auto_vacuum") == 0:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("VACUUM")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
