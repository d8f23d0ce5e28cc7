"""Processes that are stopped, not killed, at a moment when they hold no lock of a SQLite file."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

BUSY_S = 60.0


def freeze_between_writes(process: subprocess.Popen[bytes], file: Path) -> None:
    """Stop a process while we could write: one that is in the midst of it would hold the file until it goes on."""
    with closing(sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # a signal that was sent has not stopped it yet
        other.execute("ROLLBACK")
