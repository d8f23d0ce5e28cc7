"""The store in a PostgreSQL database, for gateways on several machines: see `specq.batches.interface`.

The tables have a schema of their own, `specq_batches`, also in a journal's database. The statements are those of the
SQLite kind. Each transaction holds a lock of the store, so transactions follow each other as they do in a file.

The store's time is the database's clock. A gateway reads it again each minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from specq.batches.interface import CHUNK_BYTES, BatchStoreError, StoreLimits
from specq.batches.schema import NOTE_S
from specq.batches.sqlite_files import MOST_READ
from specq.batches.store import SqliteBatches
from specq.journal.postgres.address import parse
from specq.journal.postgres.arrays import from_text, to_text
from specq.journal.postgres.schema import prepare
from specq.journal.postgres.session import DatabaseSession
from specq.protocol import ConfigError

SCHEMA = "specq_batches"
LOCK = 0x73706262  # "spbb"
STEPS = (
    """
    CREATE SCHEMA specq_batches;
    CREATE TABLE specq_batches.meta (name text PRIMARY KEY, value bigint NOT NULL);
    CREATE TABLE specq_batches.files (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        owner text NOT NULL,
        name text NOT NULL,
        purpose text NOT NULL,
        is_shown bigint NOT NULL,
        num_bytes bigint NOT NULL,
        created bigint NOT NULL,
        expires_at bigint NOT NULL,
        expires double precision NOT NULL
    );
    CREATE INDEX files_of ON specq_batches.files (owner, is_shown, num_bytes);
    CREATE INDEX files_by_age ON specq_batches.files (expires);
    CREATE TABLE specq_batches.chunks (
        file bigint NOT NULL,
        place bigint NOT NULL,
        data bytea NOT NULL,
        PRIMARY KEY (file, place)
    );
    CREATE TABLE specq_batches.batches (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        owner text NOT NULL,
        asked text NOT NULL,
        status text NOT NULL,
        has_ended bigint NOT NULL,
        input_file bigint NOT NULL,
        deadline double precision NOT NULL,
        times text NOT NULL,
        total bigint NOT NULL DEFAULT 0,
        completed bigint NOT NULL DEFAULT 0,
        failed bigint NOT NULL DEFAULT 0,
        output bigint NOT NULL DEFAULT 0,
        errors bigint NOT NULL DEFAULT 0,
        output_id text NOT NULL DEFAULT '',
        error_id text NOT NULL DEFAULT '',
        reasons text NOT NULL DEFAULT '[]',
        forget double precision NOT NULL DEFAULT 0,
        holder text NOT NULL DEFAULT '',
        held_until double precision NOT NULL DEFAULT 0
    );
    CREATE INDEX batches_of ON specq_batches.batches (owner, has_ended, number);
    CREATE INDEX unfinished ON specq_batches.batches (has_ended, forget);
    """,
)
_CHUNKS = (
    "SELECT place, data FROM (SELECT place, data, sum(octet_length(data)) OVER (ORDER BY place) - octet_length(data) "
    "AS before FROM chunks WHERE file = ? AND place > ? ORDER BY place LIMIT ?) AS next WHERE before < ? ORDER BY place"
)


class PostgresBatches(SqliteBatches):
    """A `BatchTables` in a database. Raises ConfigError if it cannot be used."""

    def __init__(self, address: str, limits: StoreLimits) -> None:
        self.limits = limits
        try:
            self._parameters, shown = parse(address)
        except ConfigError as error:
            raise ConfigError(f"serve.batches: {error}") from None
        session = DatabaseSession(self._parameters, "full", ConfigError)
        try:
            prepare(session, STEPS, SCHEMA)
        except ConfigError as error:
            raise ConfigError(f"cannot use the store of batches {shown} (serve.batches): {error}") from None
        finally:
            session.close()
        self._use(DatabaseClock())
        self._clock.note(self._connection)

    def _use(self, clock: DatabaseClock) -> None:
        options = f"{self._parameters.get('options', '')} -c search_path={SCHEMA}"
        session = DatabaseSession(self._parameters | {"options": options.strip()}, "full", _busy)
        self._connection, self._clock = cast("Any", Statements(session)), cast("Any", clock)

    def reader(self) -> PostgresBatches:
        """Return the same store, for another thread that only reads."""
        other = object.__new__(PostgresBatches)
        other.limits, other._parameters = self.limits, self._parameters
        other._use(cast("DatabaseClock", self._clock))
        return other

    def chunk(self, file: int, after: int) -> tuple[int, bytes] | None:
        rows = self._connection.execute(_CHUNKS, (file, after, MOST_READ, CHUNK_BYTES)).fetchall()
        return (rows[-1][0], b"".join(data for _, data in rows)) if rows else None

    def tidy(self) -> bool:
        self._clock.note(self._connection)
        if file := self._old_file():
            return self.drop_part(file) or True
        return self._forget_batches() > 0


def _busy(reason: str) -> BatchStoreError:
    return BatchStoreError(f"the store of batches cannot be used now: {reason}", "busy")


class DatabaseClock:
    """The time of a store: the database's, in seconds since 1970."""

    def __init__(self) -> None:
        self._offset = self._next_look = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() + self._offset

    def note(self, statements: Any) -> None:
        """Read the database's clock, if that is due."""
        sent = time.monotonic()
        if sent >= self._next_look:
            (now,) = statements.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
            self._offset, self._next_look = now - (sent + time.monotonic()) / 2, sent + NOTE_S


class Statements:
    """A database that is used as a connection to a SQLite file: `?` for values, and transactions in statements."""

    def __init__(self, session: DatabaseSession) -> None:
        self.in_transaction = False
        self._session = session

    def execute(self, statement: str, values: Sequence[Any] = ()) -> FoundRows:
        """Run a statement."""
        try:
            if statement == "BEGIN IMMEDIATE":
                self._session.query("BEGIN")
                self.in_transaction = True
                return FoundRows(self._session.query("SELECT pg_advisory_xact_lock(%s)", (LOCK,)))
            has_number = statement.startswith(("INSERT INTO files", "INSERT INTO batches"))
            given = [to_text(value) if isinstance(value, str) else value for value in values]
            text = statement.replace("?", "%s") + " RETURNING number" * has_number
            found = FoundRows(self._session.query(text, given))
        except BatchStoreError:
            self.in_transaction = False  # the connection is gone
            raise
        if statement in ("COMMIT", "ROLLBACK"):
            self.in_transaction = False
        return found

    def executemany(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement for each row of values."""
        for row in values:
            self.execute(statement, row)

    def close(self) -> None:
        """Close the connection."""
        self._session.close()


class FoundRows:
    """The rows that a statement found."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = [tuple(from_text(one) if isinstance(one, str) else one for one in row) for row in rows]

    @property
    def lastrowid(self) -> int:
        """The number of an inserted row."""
        return int(self._rows[0][0])

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def close(self) -> None:
        """Do nothing: all rows are here."""
