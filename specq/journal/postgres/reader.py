"""The reader of a journal's database: finished jobs and lists. Each question is one statement, with one view of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specq.journal import rows
from specq.journal.interface import JournalReader
from specq.journal.postgres.arrays import from_text, to_text
from specq.journal.postgres.session import DatabaseSession
from specq.journal.records import JobSummary, StoredJob
from specq.protocol import JournalBusyError

JOB = ", ".join(f"jobs.{name}" for name in rows.JOB.split(", "))
NUM_JOB, NUM_RESULT = len(rows.JOB.split(", ")), len(rows.RESULT.split(", "))
_RESULT = ", ".join(f"results.{name}" for name in rows.RESULT.split(", "))
_FIND = (
    f"SELECT {JOB}, {_RESULT}, brokers.address FROM specq.jobs "  # noqa: S608
    "LEFT JOIN specq.results ON results.job_id = jobs.job_id LEFT JOIN specq.active ON active.job_id = jobs.job_id "
    "LEFT JOIN specq.brokers ON brokers.number = active.broker AND brokers.until > clock_timestamp() "
    "WHERE jobs.job_id = %s"
)
_FINISHED = (
    f"SELECT {rows.SUMMARY} FROM specq.results JOIN specq.jobs USING (job_id) "  # noqa: S608
    "WHERE %s::text IS NULL OR owner = %s ORDER BY ended DESC, job_id DESC LIMIT %s OFFSET %s"
)
_UNFINISHED = (
    f"SELECT {rows.ACTIVE_SUMMARY}::float8 FROM specq.active JOIN specq.jobs USING (job_id) LEFT JOIN "  # noqa: S608
    "(SELECT job_id, sum(octet_length(token_ids))::bigint / 4 AS num_tokens FROM specq.commits GROUP BY job_id) AS c "
    "USING (job_id) WHERE %s::text IS NULL OR owner = %s ORDER BY submitted, job_id LIMIT %s"
)


class PostgresReader(JournalReader):
    """A `specq.journal.JournalReader` of a database."""

    def __init__(self, address: str, parameters: dict[str, Any]) -> None:
        self._address, self._session = address, DatabaseSession(parameters, "process", self._busy)

    def find(self, job_id: int) -> StoredJob | None:
        """Return a job, or None if it is not in the journal. An unfinished job comes without its tokens."""
        found = self._session.query(_FIND, (job_id,), prepare=True)
        if not found:
            return None
        (row,) = found
        job = rows.stored_job(readable(row[:NUM_JOB]))
        weights, finish, ended, code, reason, *rest = row[NUM_JOB : NUM_JOB + NUM_RESULT]
        if finish is not None:
            rows.add_result(job, (from_text(weights), finish, ended, from_text(code), from_text(reason), *_stats(rest)))
        job.holder = row[-1] or ""
        return job

    def finished(self, limit: int, skip: int = 0, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the ended jobs, newest first. None as `owner`: the jobs of all owners."""
        return self._summaries(_FINISHED, owner, limit, skip)

    def unfinished(self, limit: int, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the oldest unfinished jobs of all brokers. None as `owner`: the jobs of all owners."""
        return self._summaries(_UNFINISHED, owner, limit)

    def _summaries(self, query: str, owner: str | None, *values: int) -> list[JobSummary]:
        stored = None if owner is None else to_text(owner)
        return [
            JobSummary(job_id, from_text(label), from_text(model), from_text(owner), *rest)
            for job_id, label, model, owner, *rest in self._session.query(query, (stored, stored, *values))
        ]

    def close(self) -> None:
        self._session.close()

    def _busy(self, reason: str) -> JournalBusyError:
        return JournalBusyError(f"the journal {self._address} cannot be read: {reason}")


def _stats(rest: Sequence[Any]) -> tuple[Any, ...]:
    stats, *arrays = rest
    return (from_text(stats), *arrays)


def readable(job: Sequence[Any]) -> tuple[Any, ...]:
    """Return a row of `JOB` with its texts as they were."""
    return tuple(from_text(value) if isinstance(value, str) else value for value in job)
