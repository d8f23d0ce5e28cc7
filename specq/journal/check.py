"""Read all of a journal, and find what is wrong in it. Brokers may use it meanwhile: the check has one view of it.

Both kinds of journals have the same tables, so the same statements read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from specq.journal import rows
from specq.journal.interface import kind_of
from specq.journal.records import StoredJob
from specq.protocol import ConfigError, JournalBusyError

PAGE = 200  # rows that are read at once
MOST_S = 3600.0
FEW = 20  # faults that are described

Row = tuple[Any, ...]
Query = Callable[[str, int], list[Row]]  # a statement with one parameter, the last job's id


class JournalReport(NamedTuple):
    """What a journal has. `faults`: descriptions, at most `FEW`. `num_misfits`: jobs with values out of bounds now."""

    num_unfinished: int
    num_results: int
    num_tokens: int
    num_misfits: int
    num_faults: int
    faults: list[str]


class _Findings:
    """Counts, and the first faults."""

    def __init__(self) -> None:
        self.num_unfinished = self.num_results = self.num_tokens = self.num_misfits = self.num_faults = 0
        self.faults: list[str] = []

    def add(self, job_id: int, fault: str) -> None:
        self.num_faults += 1
        if len(self.faults) < FEW:
            self.faults.append(f"job {job_id}: {fault}")


def check_journal(address: str) -> JournalReport:
    """Read a journal. Raises ConfigError if it is not there, or cannot be read."""
    found = _Findings()
    try:
        with _opened(address) as query:
            for row in _pages(query, f"SELECT {rows.JOB} FROM jobs"):  # noqa: S608 - our own names
                _check_job(found, query, row)
            for table in ("active", "results"):
                lost = f"SELECT job_id FROM {table}"  # noqa: S608 - our own names
                for (job_id,) in _pages(query, lost, "job_id NOT IN (SELECT job_id FROM jobs)"):
                    found.add(job_id, f"it is in {table}, and its request is missing")
    except JournalBusyError as error:
        raise ConfigError(str(error)) from None
    counts = found.num_unfinished, found.num_results, found.num_tokens, found.num_misfits, found.num_faults
    return JournalReport(*counts, found.faults)


def require_journal(address: str) -> None:
    """Raise ConfigError if there is no journal at an address."""
    with _opened(address):
        pass


@contextmanager
def _opened(address: str) -> Iterator[Query]:
    """Yield how to read a journal's tables."""
    kind = kind_of(address)
    opened = {"sqlite": _sqlite, "postgresql": _postgres}.get(kind)
    if opened is None:
        raise ConfigError(f"{kind}:// journals cannot be checked")
    with opened(address) as found:
        yield found


@contextmanager
def _sqlite(address: str) -> Iterator[Query]:
    import sqlite3

    from specq.journal.sqlite.connection import APPLICATION_ID, connect

    path = Path(address.removeprefix("sqlite://")).expanduser()
    try:
        connection = connect(path, read_only=True)
        try:
            connection.execute("BEGIN")
            if connection.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
                raise ConfigError(f"{path} is not a journal")

            def query(statement: str, job_id: int) -> list[Row]:
                return connection.execute(statement, (job_id,)).fetchall()

            yield query
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ConfigError(f"the journal {path} cannot be read: {error}") from None


@contextmanager
def _postgres(address: str) -> Iterator[Query]:
    from specq.journal.postgres.address import parse
    from specq.journal.postgres.reader import readable
    from specq.journal.postgres.schema import version
    from specq.journal.postgres.session import DatabaseSession

    parameters, shown = parse(address)
    session = DatabaseSession(parameters, "process", lambda reason: ConfigError(f"the journal {shown}: {reason}"))
    try:
        if not version(session):
            raise ConfigError(f"the database {shown} has no journal")
        with session.transaction(MOST_S):
            session.script("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL search_path = specq")

            def query(statement: str, job_id: int) -> list[Row]:
                return [readable(row) for row in session.query(statement.replace("?", "%s"), (job_id,))]

            yield query
    finally:
        session.close()


def _pages(query: Query, statement: str, condition: str = "1 = 1") -> Iterator[Row]:
    """Yield the rows of a statement, whose first column is the job's id, in the order of ids."""
    last = -(2**63)
    while page := query(f"{statement} WHERE {condition} AND job_id > ? ORDER BY job_id LIMIT {PAGE}", last):
        yield from page
        last = page[-1][0]


def _check_job(found: _Findings, query: Query, row: Row) -> None:
    job_id = row[0]
    active = query("SELECT job_id FROM active WHERE job_id = ?", job_id)
    results = query(f"SELECT {rows.RESULT} FROM results WHERE job_id = ?", job_id)  # noqa: S608
    found.num_unfinished, found.num_results = found.num_unfinished + len(active), found.num_results + len(results)
    if len(active) + len(results) != 1:
        found.add(job_id, "it has ended and is unfinished" if active else "it has neither ended nor is it unfinished")
    try:
        job = rows.stored_job(row)
    except ConfigError as error:
        found.add(job_id, f"its request is unreadable ({error})")
        job = StoredJob(None)  # type: ignore[arg-type] # the tokens are checked without it
    found.num_misfits += bool(job.misfit)
    for result in results:
        _check_result(found, job_id, result)
    if active:
        _check_tokens(found, query, job, job_id)


def _check_result(found: _Findings, job_id: int, result: Row) -> None:
    *_, stats, token_ids, origins, _ = result
    found.num_tokens += len(token_ids) // 4
    if len(token_ids) != 4 * len(origins):
        found.add(job_id, f"its result has {len(token_ids)} bytes of tokens, and origins of {len(origins)} tokens")
    try:
        orjson.loads(stats)
    except orjson.JSONDecodeError:
        found.add(job_id, "the counts of its result are unreadable")


def _check_tokens(found: _Findings, query: Query, job: StoredJob, job_id: int) -> None:
    for row in query(f"SELECT {rows.COMMIT} FROM commits WHERE job_id = ? ORDER BY number", job_id):  # noqa: S608
        if row[1] > job.num_tokens:
            found.add(job_id, f"tokens {job.num_tokens} to {row[1]} are missing, so later ones are made again")
            break
        rows.add_commit(job, row)
    found.num_tokens += job.num_tokens
    if len(job.token_ids) != 4 * len(job.origins):
        found.add(job_id, f"it has {len(job.token_ids)} bytes of tokens, and origins of {len(job.origins)} tokens")
