"""The journal's file: groups of records in, unfinished jobs out (see `specq.journal.Journal`).

Rule: a group is one transaction, and the transaction first checks the fence.

`durability`: "full" waits for the disk at each group, "process" leaves that to the system. The file stays consistent in
both cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from specq.journal import rows
from specq.journal.interface import Journal, Kept, Noted, Opening
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
from specq.journal.sqlite.connection import (
    acquire,
    configure,
    connect,
    give_back,
    is_newest,
    let_shrink,
    note,
    oldest,
    opening_errors,
    prepare,
    room,
    writing_errors,
)
from specq.journal.sqlite.reader import SqliteReader
from specq.protocol import JournalBusyError, JournalLostError

SCHEME = "sqlite://"
MOST_STALE = 20_000  # obsolete rows of commits, before they are deleted
FEW_STALE = 1000  # up to this many are kept while there are results to forget
_CHUNKS = (64, 16, 4, 1)  # rows per statement: fewer calls, and fewer waits of the loop's thread
_COMMITS = f"INSERT INTO commits ({rows.COMMIT}) VALUES "  # noqa: S608 - the names are ours
_COMMIT_ROW = "(?,?,?,?,?,?,?,?)"
_JOBS = f"INSERT OR REPLACE INTO jobs ({rows.JOB}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)"  # noqa: S608
_CRASHES = "UPDATE active SET deaths = ?, lone_deaths = ?, death_length = ? WHERE job_id = ?"
_RESULTS = (
    "INSERT OR REPLACE INTO results (weights, finish, ended, code, reason, stats, num_bytes, token_ids, origins, "
    "logprobs, job_id) SELECT weights, ?, ?, ?, ?, ?, ?, ?, ?, ?, job_id FROM active WHERE job_id = ?"
)


class SqliteJournal(Journal):
    """A `specq.journal.Journal` in a file."""

    def __init__(self, address: str, opening: Opening) -> None:
        self.address, self._path = address, Path(address.removeprefix(SCHEME)).expanduser()
        with opening_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)  # prompts and texts are private to the user
            self._connection = connect(self._path)
            try:
                self._own(opening)
            except BaseException:
                self._connection.close()
                raise
        self.epoch, self.offset = self._ownership.epoch, self._ownership.offset
        self._may_take = self._ownership.fence > 1  # the jobs of earlier brokers
        self._num_rows: Counter[int] = Counter()  # of commits, by unfinished job
        self._stale: Counter[int] = Counter()  # and by other jobs: obsolete

    def _own(self, opening: Opening) -> None:
        configure(self._connection, opening.durability)
        prepare(self._connection)
        self._ownership = acquire(self._connection, self._path, opening)
        let_shrink(self._connection)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, records: Sequence[Record]) -> frozenset[int]:
        """Journal a group of records, as a whole or not at all. Its only broker holds all jobs."""
        merged = rows.merge(records)
        with self._transaction():
            for record in records:
                if not isinstance(record, TokensAdded):
                    self._apply(record)
            self._insert_commits([one.row() for one in merged.values()])
        self._count_stale(records, merged)
        return frozenset()

    def renew(self) -> tuple[str, ...]:
        """Check the ownership. The lock holds for as long as the process lives."""
        self._check()
        return ()

    def lost(self) -> frozenset[int]:
        """Return no job: they belong to the owner of the journal."""
        return frozenset()

    def _check(self) -> None:
        with writing_errors(self._path):
            newest = is_newest(self._connection, self._ownership.fence)
        if not newest:
            raise JournalLostError(f"the journal {self._path} now belongs to another broker")

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
            execute(_CRASHES, (*record.crashes, record.job_id))
        elif isinstance(record, JobEnded):
            execute(_RESULTS, rows.result_row(record))
            execute("DELETE FROM active WHERE job_id = ?", (record.job_id,))
        else:
            self._forget([record.job_id])

    def _clear_old(self, job_id: int) -> None:
        """Delete the remains of an earlier job with the same id."""
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
        """Count the obsolete rows of commits, and delete them when there are many."""
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
        with writing_errors(self._path):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._check()
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    # --- old results ------------------------------------------------------------------------------------------------

    def keep_to(self, most_bytes: int, before: float = 0.0) -> Kept:
        """Do one small step: forget results from before `before`, and the oldest while the journal is too large."""
        with writing_errors(self._path):
            surplus = room(self._connection).used_bytes - most_bytes
            if surplus <= 0 and before <= 0.0:
                return Kept(0, is_full=False)
            gone = oldest(self._connection, before, surplus)
        if gone:
            with self._transaction():
                self._forget(gone)
        if surplus > 0 and self._stale.total() > (max(FEW_STALE, self._num_rows.total()) if gone else 0):
            self._clear_commits()
            return Kept(len(gone), is_full=False)
        return Kept(len(gone), is_full=surplus > 0 and not gone)

    def note_time(self, noted: Noted) -> None:
        """Note the journal's time."""
        with self._transaction():
            note(self._connection, noted)

    def give_back(self, most_bytes: int, *, idle: bool) -> bool:
        """Return free space to the file system in one small step: see `specq.journal.sqlite.connection`."""
        with writing_errors(self._path):
            return give_back(self._connection, self._path, most_bytes, idle=idle)

    # --- reading ----------------------------------------------------------------------------------------------------

    def take(self) -> list[StoredJob]:
        """Become the holder of the jobs of earlier brokers: all at the first call."""
        may_take, self._may_take = self._may_take, False
        return [replace(job, epoch=self.epoch) for job in self.unfinished()] if may_take else []

    def unfinished(self) -> list[StoredJob]:
        """Return the unfinished jobs, oldest first, with all their tokens. Delete the commits of other jobs."""
        with opening_errors(self._path):
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

    def reader(self) -> SqliteReader:
        """Return a new reader of the same file."""
        return SqliteReader(self._path)

    def close(self) -> None:
        """Close the file and release it, so that another broker can open it."""
        self._connection.close()
        self._ownership.release()
