"""The journal's file: groups of records in, unfinished jobs out.

Rules: a group is one transaction, which begins by making sure that the journal still belongs to this broker. What cannot
be written now (the disk is full, another program holds the file) is `JournalBusyError`, and the same group may be tried again;
a broker that is no longer the owner gets `JournalLostError`. One thread at a time.

`durability`: "full" waits for the disk at each group, and so survives the loss of power; "process" leaves that to the
system, and so survives the death of the process only (the file stays whole either way).
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from specq.journal.records import (
    Crashes,
    JobBound,
    JobCrashed,
    JobDropped,
    JobEnded,
    JobTaken,
    Record,
    StoredJob,
    TokensAdded,
)
from specq.journal.sqlite import room, rows
from specq.journal.sqlite.fence import acquire, is_newest
from specq.journal.sqlite.schema import prepare
from specq.protocol import ConfigError, JournalBusyError, JournalLostError

DURABILITIES = {"full": "FULL", "process": "NORMAL"}
BUSY_S = 0.25  # how long a statement waits for another program
MOST_STALE = 20_000  # rows of commits that nobody needs any more, before they are cleared away
FEW_STALE = 1000  # of them, which are not worth looking for while there are results to forget
_CHUNKS = (64, 16, 4, 1)  # rows that one statement inserts: fewer calls, and fewer times that the loop's thread waits
_COMMITS = f"INSERT INTO commits ({rows.COMMIT}) VALUES "  # noqa: S608 - the names are ours
_COMMIT_ROW = "(?,?,?,?,?,?,?)"
_JOBS = f"INSERT OR REPLACE INTO jobs ({rows.JOB}) VALUES (?,?,?,?,?,?,?,?,?,?)"  # noqa: S608
_SUSPECTS = "UPDATE active SET deaths = ?, lone_deaths = ?, death_length = ? WHERE job_id = ?"
_RESULTS = (
    "INSERT OR REPLACE INTO results (weights, finish, ended, code, reason, stats, num_bytes, token_ids, accepted, "
    "logprobs, job_id) SELECT weights, ?, ?, ?, ?, ?, ?, ?, ?, ?, job_id FROM active WHERE job_id = ?"
)


class Kept(NamedTuple):
    """What a step of keeping a journal to its limit came to.

    num_forgotten  results that were forgotten; is_full: the journal is beyond its limit, and has nothing that may be forgotten
    """

    num_forgotten: int
    is_full: bool


class Journal:
    """An open journal and its ownership. Raises ConfigError if it is no journal, cannot be used, or is in use.

    owner  what is told of this broker to others that want the same journal
    floor  epochs shall lie above this; `epoch` says above what they do
    is_old another broker had it before
    """

    def __init__(
        self, path: Path, *, durability: str = "full", owner: str = "", floor: int = 0, take_over: bool = False
    ) -> None:
        self.path = path
        with _usable(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)  # what users ask and are told is nobody else's business
            self._connection = connect(path)
            try:
                _configure(self._connection, durability)
                prepare(self._connection)
                self._ownership = acquire(self._connection, path, owner, floor, take_over=take_over)
                room.let_shrink(self._connection)
            except BaseException:
                self._connection.close()
                raise
        self.epoch, self.is_old = self._ownership.epoch, self._ownership.fence > 1
        self._num_rows: Counter[int] = Counter()  # of commits, by job that has not ended
        self._stale: Counter[int] = Counter()  # and of other jobs: of no use any more

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, records: Sequence[Record]) -> None:
        """Journal a group of records, whole or not at all."""
        merged = rows.merge(records)
        with self._transaction():
            for record in records:
                if not isinstance(record, TokensAdded):
                    self._apply(record)
            self._insert_commits([one.row() for one in merged.values()])
        self._count_stale(records, merged)

    def check(self) -> None:
        """Raise JournalLostError if the journal belongs to another broker by now."""
        with _told(self.path):
            newest = is_newest(self._connection, self._ownership.fence)
        if not newest:
            raise JournalLostError(f"the journal {self.path} belongs to another broker now")

    def _apply(self, record: JobTaken | JobBound | JobCrashed | JobEnded | JobDropped) -> None:
        """Carry out a record."""
        execute = self._connection.execute
        if isinstance(record, JobTaken):
            self._clear_old(record.job_id)
            execute(_JOBS, rows.job_row(record))
            execute("INSERT OR REPLACE INTO active (job_id, weights) VALUES (?, '')", (record.job_id,))
        elif isinstance(record, JobBound):
            values = record.weights, record.placed, record.job_id
            execute("UPDATE active SET weights = ?, placed = ? WHERE job_id = ?", values)
        elif isinstance(record, JobCrashed):
            execute(_SUSPECTS, (*record.crashes, record.job_id))
        elif isinstance(record, JobEnded):
            execute(_RESULTS, rows.result_row(record))
            execute("DELETE FROM active WHERE job_id = ?", (record.job_id,))
        else:
            self._forget([record.job_id])

    def _clear_old(self, job_id: int) -> None:
        """Clear away what is left of a job that had the same id."""
        if job_id in self._stale or job_id in self._num_rows:
            self._connection.execute("DELETE FROM commits WHERE job_id = ?", (job_id,))

    def _insert_commits(self, values: list[tuple[object, ...]]) -> None:
        for size in _CHUNKS:
            while len(values) >= size:
                chunk, values = values[:size], values[size:]
                flat = [value for row in chunk for value in row]
                self._connection.execute(_COMMITS + ",".join([_COMMIT_ROW] * size), flat)

    def _forget(self, job_ids: Sequence[int]) -> None:
        for table in ("jobs", "active", "results"):
            self._connection.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(i,) for i in job_ids])  # noqa: S608

    def _count_stale(self, records: Sequence[Record], added: Iterable[int]) -> None:
        """Count the rows of commits that are of no use any more, and clear them away when they are many."""
        for job_id in added:
            self._num_rows[job_id] += 1
        for record in records:
            if isinstance(record, (JobEnded, JobDropped)) and record.job_id in self._num_rows:
                self._stale[record.job_id] += self._num_rows.pop(record.job_id)
        if self._stale.total() > max(MOST_STALE, self._num_rows.total()):
            with suppress(JournalBusyError):  # the group itself is journaled; this can wait
                self._clear_commits()

    def _clear_commits(self) -> None:
        with self._transaction():
            self._connection.execute("DELETE FROM commits WHERE job_id NOT IN (SELECT job_id FROM active)")
        self._stale.clear()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _told(self.path):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self.check()
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    # --- old results ------------------------------------------------------------------------------------------------

    def keep_to(self, most_bytes: int, before: float = 0.0) -> Kept:
        """Forget results that ended before then, and the oldest while the journal takes more bytes: one small step."""
        with _told(self.path):
            surplus = room.room(self._connection).used_bytes - most_bytes
            if surplus <= 0 and before <= 0.0:
                return Kept(0, is_full=False)
            gone = room.oldest(self._connection, before, surplus)
        if gone:
            with self._transaction():
                self._forget(gone)
        if surplus > 0 and self._stale.total() > (max(FEW_STALE, self._num_rows.total()) if gone else 0):
            self._clear_commits()
            return Kept(len(gone), is_full=False)
        return Kept(len(gone), is_full=surplus > 0 and not gone)

    def give_back(self, most_bytes: int, *, idle: bool) -> bool:
        """Give room that is free back to the file system, a small step: see `specq.journal.sqlite.room`."""
        with _told(self.path):
            return room.give_back(self._connection, self.path, most_bytes, idle=idle)

    # --- reading ----------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[StoredJob]:
        """Return the jobs that have not ended, oldest first, with all their tokens; commits of others are cleared away."""
        with _usable(self.path):
            self._clear_commits()
            found = self._connection.execute(
                f"SELECT {rows.JOB}, weights, placed, deaths, lone_deaths, death_length "  # noqa: S608
                "FROM jobs JOIN active USING (job_id) ORDER BY submitted, job_id"
            )
            jobs = {
                row[0]: replace(rows.stored_job(row[:-5]), weights=row[-5], placed=row[-4], crashes=Crashes(*row[-3:]))
                for row in found
            }
            for row in self._connection.execute(f"SELECT {rows.COMMIT} FROM commits ORDER BY number"):  # noqa: S608
                rows.add_commit(jobs[row[0]], row)
                self._num_rows[row[0]] += 1
        return list(jobs.values())

    def close(self) -> None:
        """Close the file and let another broker have it."""
        self._connection.close()
        self._ownership.release()


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection that any one thread at a time may use; each statement commits by itself."""
    mode = "ro" if read_only else "rwc"
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )


def _configure(connection: sqlite3.Connection, durability: str) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file only
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {DURABILITIES[durability]}")
    connection.execute("PRAGMA fullfsync = 1")  # of macOS only
    connection.execute(f"PRAGMA journal_size_limit = {room.MOST_WAL}")


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Turn what goes wrong when a journal is opened into ConfigError."""
    try:
        yield
    except (ConfigError, JournalBusyError) as error:
        raise ConfigError(f"cannot use the journal {path}: {error}") from None
    except (sqlite3.Error, OSError) as error:
        locked = "another program is in the midst of writing to it; if that is a broker that hangs, end it (kill -9)"
        hint = locked if "locked" in str(error) else str(error)
        raise ConfigError(f"cannot use the journal {path}: {hint}") from None


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what goes wrong with an open journal into JournalBusyError."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalBusyError(f"the journal {path} cannot be written: {error}") from None
