"""Who owns a journal: one broker at a time, identified by a number that rises with each owner, the fence.

An owner holds a lock on a file beside the journal; the fence is part of the file's name. The system releases the lock
when the process ends, however it ends. A broker that finds the lock held is refused, unless it takes the journal over:
it raises the fence, and the former owner, frozen or cut off, finds at its next group of records that its fence is not
the newest, and stops.
"""

from __future__ import annotations

import fcntl
import sqlite3
from pathlib import Path

from specq.journal.clock import read_clocks
from specq.journal.interface import EPOCHS, Opening
from specq.journal.sqlite.times import go_on
from specq.protocol import ConfigError


class Ownership:
    """A broker's hold on a journal, from its construction until `release`.

    Its epochs are those above `epoch`; `offset` is that of the journal's time.
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
    """Become the owner of a journal; raises ConfigError if a living broker owns it, unless `take_over`."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        meta = dict(connection.execute("SELECT name, value FROM meta").fetchall())
        former = int(meta.get("fence", 0))
        if _is_locked(_lock_path(journal, former)) and not opening.take_over:
            raise ConfigError(
                f"it is in use by another broker ({meta.get('owner')}); stop that one, or give this one an address and a journal of its own "
                "(--bind, --journal). "
                "If that one hangs, start this one with --take-over"
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
    """Does the journal still belong to the owner with this fence?"""
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
