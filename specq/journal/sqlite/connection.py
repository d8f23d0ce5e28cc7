"""Connections to a journal's file, its time and its owner. SQLite's errors become the journal's.

The journal's time in a SQLite file: see `specq.journal.interface`. `meta` has the last noted `time`, `boot` and
`uptime`.

One broker at a time owns a journal. A number that rises with each owner identifies it, the fence. An owner holds a lock
on a file beside the journal. The fence is part of the file's name. The system releases the lock when the process ends,
for any reason. A broker that finds the lock held is refused, unless it takes the journal over. To take it over, it
raises the fence. The former owner may be frozen or cut off. At its next group of records it notices that its fence is
not the newest, and stops.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specq.journal.interface import EPOCHS, Clocks, MachineClock, Noted, Opening, offset_of, read_clocks
from specq.journal.sqlite.schema import MOST_WAL
from specq.protocol import ConfigError, JournalBusyError

KEEP_ORDER = 1e-5  # corrected times keep this part of their distances, so that they keep their order
_NAMES = ("time", "boot", "uptime")
_NEWEST = (
    "SELECT max((SELECT coalesce(max(ended), 0) FROM results), "
    "(SELECT coalesce(max(submitted), 0) FROM jobs JOIN active USING (job_id)))"
)
_BRING_BACK = (
    f"UPDATE results SET ended = :now - {KEEP_ORDER} * (:newest - ended) WHERE ended > :now",  # noqa: S608 - a constant
    "UPDATE jobs SET deadline = deadline - submitted + :now WHERE submitted > :now AND deadline > 0",
    f"UPDATE jobs SET submitted = :now - {KEEP_ORDER} * (:newest - submitted) WHERE submitted > :now",  # noqa: S608
)


def go_on(connection: sqlite3.Connection, clocks: Clocks) -> float:
    """Continue the journal's time for a new owner, within its transaction, and return the offset."""
    (newest,) = connection.execute(_NEWEST).fetchone()
    offset = offset_of(clocks, _noted(connection), newest)
    now = clocks.monotonic + offset
    if newest > now:
        for statement in _BRING_BACK:
            connection.execute(statement, {"now": now, "newest": newest})
    note(connection, Noted(now, clocks.machine))
    return offset


def note(connection: sqlite3.Connection, noted: Noted) -> None:
    """Note the journal's time."""
    values = zip(_NAMES, (noted.time, *noted.machine), strict=True)
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)


def _noted(connection: sqlite3.Connection) -> Noted | None:
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    return Noted(meta["time"], MachineClock(meta["boot"], meta["uptime"])) if meta.keys() >= set(_NAMES) else None


DURABILITIES = {"full": "FULL", "process": "NORMAL"}
BUSY_S = 0.25  # how long a statement waits for another program


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection for one thread at a time. Each statement commits by itself."""
    mode = "ro" if read_only else "rwc"
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )


def configure(connection: sqlite3.Connection, durability: str) -> None:
    """Configure a connection for writing the journal."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # affects a new file only
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {DURABILITIES[durability]}")
    connection.execute("PRAGMA fullfsync = 1")  # affects macOS only
    connection.execute(f"PRAGMA journal_size_limit = {MOST_WAL}")


@contextmanager
def opening_errors(path: Path) -> Iterator[None]:
    """Turn errors while opening a journal into ConfigError."""
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
    """Turn errors of an open journal into JournalBusyError."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalBusyError(f"the journal {path} cannot be written: {error}") from None


class Ownership:
    """A broker's hold on a journal, from its construction until `release`.

    Its epochs are above `epoch`. `offset` is that of the journal's time.
    """

    def __init__(self, fence: int, epoch: int, offset: float, path: Path) -> None:
        self.fence, self.epoch, self.offset, self._path = fence, epoch, offset, path
        self._lock = path.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Release the journal."""
        self._path.unlink(missing_ok=True)
        self._lock.close()


def acquire(connection: sqlite3.Connection, journal: Path, opening: Opening) -> Ownership:
    """Become the owner of a journal.

    Raises ConfigError if a live broker owns it, unless `take_over`.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        meta = dict(connection.execute("SELECT name, value FROM meta").fetchall())
        former = int(meta.get("fence", 0))
        if _is_locked(_lock_path(journal, former)) and not opening.take_over:
            raise ConfigError(
                f"it is in use by another broker ({meta.get('owner')}); stop that one, or give this one an address "
                f"and a journal of its own (--bind, --journal). If that one hangs, start this one with --take-over"
            )
        fence, epoch = former + 1, max(int(meta.get("epoch", 0)), opening.floor)
        offset = go_on(connection, opening.clocks or read_clocks())
        held = Ownership(fence, epoch, offset, _lock_path(journal, fence))
        values = {"fence": fence, "epoch": epoch + EPOCHS, "owner": opening.owner}
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    _tidy(_lock_path(journal, former))
    return held


def is_newest(connection: sqlite3.Connection, fence: int) -> bool:
    """Return whether the journal still belongs to the owner with this fence."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'fence'").fetchone()
    return bool(row and row[0] == fence)


def _lock_path(journal: Path, fence: int) -> Path:
    return journal.with_name(f"{journal.name}.lock-{fence}")


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _tidy(path: Path) -> None:
    """Remove the lock file of an owner that is gone."""
    if not _is_locked(path):
        path.unlink(missing_ok=True)
