"""Connections to a journal's file, and SQLite's errors as the journal's."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specq.journal.sqlite import room
from specq.protocol import ConfigError, JournalBusyError

DURABILITIES = {"full": "FULL", "process": "NORMAL"}
BUSY_S = 0.25  # how long a statement waits for another program


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


def configure(connection: sqlite3.Connection, durability: str) -> None:
    """Make a connection one that writes the journal."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file only
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {DURABILITIES[durability]}")
    connection.execute("PRAGMA fullfsync = 1")  # of macOS only
    connection.execute(f"PRAGMA journal_size_limit = {room.MOST_WAL}")


@contextmanager
def opening_errors(path: Path) -> Iterator[None]:
    """Turn what goes wrong when a journal is opened into ConfigError."""
    try:
        yield
    except (ConfigError, JournalBusyError) as error:
        raise ConfigError(f"cannot use the journal {path}: {error}") from None
    except (sqlite3.Error, OSError) as error:
        locked = "another program is writing to it; if that is a broker that hangs, end it (kill -9)"
        hint = locked if "locked" in str(error) else str(error)
        raise ConfigError(f"cannot use the journal {path}: {hint}") from None


@contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """Turn what goes wrong with an open journal into JournalBusyError."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalBusyError(f"the journal {path} cannot be written: {error}") from None
