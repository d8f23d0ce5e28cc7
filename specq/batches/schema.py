"""The file of the store: its tables, its time, and its connections.

Rule: a released step never changes. A new version is a new step at the end of `STEPS`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specq.batches.interface import LEASE_S, BatchStoreError
from specq.journal import MachineClock, Noted, offset_of, read_clocks
from specq.protocol import ConfigError

APPLICATION_ID = 0x73706262  # "spbb"
STEPS = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        is_shown INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        created INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        expires REAL NOT NULL
    );
    CREATE INDEX files_of ON files (owner, is_shown, num_bytes);
    CREATE INDEX files_by_age ON files (expires);
    CREATE TABLE chunks (
        file INTEGER NOT NULL,
        place INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (file, place)
    );
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        asked TEXT NOT NULL,
        status TEXT NOT NULL,
        has_ended INTEGER NOT NULL,
        input_file INTEGER NOT NULL,
        deadline REAL NOT NULL,
        times TEXT NOT NULL,
        total INTEGER NOT NULL DEFAULT 0,
        completed INTEGER NOT NULL DEFAULT 0,
        failed INTEGER NOT NULL DEFAULT 0,
        output INTEGER NOT NULL DEFAULT 0,
        errors INTEGER NOT NULL DEFAULT 0,
        output_id TEXT NOT NULL DEFAULT '',
        error_id TEXT NOT NULL DEFAULT '',
        reasons TEXT NOT NULL DEFAULT '[]',
        forget REAL NOT NULL DEFAULT 0,
        holder TEXT NOT NULL DEFAULT '',
        held_until REAL NOT NULL DEFAULT 0
    );
    CREATE INDEX batches_of ON batches (owner, has_ended, number);
    CREATE INDEX unfinished ON batches (has_ended, forget);
    """,
)
BUSY_S = 5.0  # how long a statement waits for another process
NOTE_S = 60.0
MOST_WAL = 8 << 20
_NOTED = ("time", "boot", "uptime")


def open_file(path: Path) -> sqlite3.Connection:
    """Return a connection to the store's file, which is created if necessary. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)  # prompts and texts are private to the user
        connection = connect(path)
        try:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # affects a new file only
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {MOST_WAL}")
            _upgrade(connection)
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError, ConfigError) as error:
        raise ConfigError(f"cannot use the store of batches {path} (serve.batches): {error}") from None
    return connection


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection for one thread at a time. Each statement commits by itself."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def _upgrade(connection: sqlite3.Connection) -> None:
    with transaction(connection):
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] and application != APPLICATION_ID:
            raise ConfigError("it is a SQLite file of another program")
        if version > len(STEPS):
            raise ConfigError(f"its version is {version}; this specq reads versions up to {len(STEPS)}")
        for step in STEPS[version:]:
            for statement in filter(str.strip, step.split(";")):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(STEPS)}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Carry out statements as a whole or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn errors of SQLite into BatchStoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise BatchStoreError(f"the store of batches cannot be used now: {error}", "busy") from None


class StoreClock:
    """The time of a store. It continues from the last note in the file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        clocks = read_clocks()
        with transaction(connection):
            meta = dict(connection.execute("SELECT name, value FROM meta"))
            is_noted = meta.keys() >= set(_NOTED)
            noted = Noted(meta["time"], MachineClock(meta["boot"], meta["uptime"])) if is_noted else None
            self._offset = offset_of(clocks, noted, 0.0)
            latest = self.now() + LEASE_S  # a note may be missing: then leases seem longer than they are
            connection.execute("UPDATE batches SET held_until = ? WHERE held_until > ?", (latest, latest))
            self._note(connection)

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() + self._offset

    def note(self, connection: sqlite3.Connection) -> None:
        """Note the time, if that is due."""
        if time.monotonic() >= self._next_note:
            with transaction(connection):
                self._note(connection)

    def _note(self, connection: sqlite3.Connection) -> None:
        machine = read_clocks().machine
        rows = zip(_NOTED, (self.now(), machine.boot, machine.uptime), strict=True)
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        self._next_note = time.monotonic() + NOTE_S
