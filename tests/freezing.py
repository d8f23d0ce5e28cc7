"""Processes that are stopped, not killed, at a moment when they hold no lock of a SQLite file."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

BUSY_S = 0.5


def freeze_between_writes(process: subprocess.Popen[bytes], file: Path) -> None:
    """Stop a process that is not in the midst of writing; one that is would hold the file until it goes on."""
    with closing(sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)) as other:
        process.send_signal(signal.SIGSTOP)
        while not locks(other):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGSTOP)
        other.execute("ROLLBACK")


def locks(connection: sqlite3.Connection) -> bool:
    """Return whether the connection could begin to write."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    return True
