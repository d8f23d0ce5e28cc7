"""The reader of a journal's file: finished jobs and lists. It never waits for the writer (WAL)."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from specq.journal.interface import JournalReader
from specq.journal.records import JobSummary, StoredJob
from specq.journal.rows import ACTIVE_SUMMARY, JOB, RESULT, SUMMARY, add_result, stored_job
from specq.journal.sqlite.connection import connect
from specq.protocol import JournalBusyError


class SqliteReader(JournalReader):
    """A `specq.journal.JournalReader` of an existing file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = connect(path, read_only=True)

    def find(self, job_id: int) -> StoredJob | None:
        """Return a job, or None if it is not in the journal. An unfinished job comes without its tokens."""
        try:
            self._connection.execute("BEGIN")  # one view of all tables
            found = self._one(f"SELECT {JOB} FROM jobs WHERE job_id = ?", job_id)  # noqa: S608
            result = self._one(f"SELECT {RESULT} FROM results WHERE job_id = ?", job_id)  # noqa: S608
        except sqlite3.Error as error:
            raise self._busy(error) from None
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        job = stored_job(found) if found else None
        if job is not None and result is not None:
            add_result(job, result)
        return job

    def _one(self, query: str, job_id: int) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(query, (job_id,)).fetchone()
        return row

    def finished(self, limit: int, skip: int = 0, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the ended jobs, newest first. None as `owner`: the jobs of all owners."""
        query = (
            f"SELECT {SUMMARY} FROM results JOIN jobs USING (job_id) WHERE ? IS NULL OR owner = ? "  # noqa: S608
            "ORDER BY ended DESC LIMIT ? OFFSET ?"
        )
        return self._summaries(query, owner, owner, limit, skip)

    def unfinished(self, limit: int, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the oldest unfinished jobs. None as `owner`: the jobs of all owners."""
        query = (
            f"SELECT {ACTIVE_SUMMARY} FROM active JOIN jobs USING (job_id) LEFT JOIN "  # noqa: S608
            "(SELECT job_id, sum(length(token_ids)) / 4 AS num_tokens FROM commits GROUP BY job_id) USING (job_id) "
            "WHERE ? IS NULL OR owner = ? ORDER BY submitted, job_id LIMIT ?"
        )
        return self._summaries(query, owner, owner, limit)

    def _summaries(self, query: str, *values: object) -> list[JobSummary]:
        try:
            return [JobSummary(*row) for row in self._connection.execute(query, values)]
        except sqlite3.Error as error:
            raise self._busy(error) from None

    def close(self) -> None:
        self._connection.close()

    def _busy(self, error: sqlite3.Error) -> JournalBusyError:
        return JournalBusyError(f"the journal {self.path} cannot be read: {error}")
