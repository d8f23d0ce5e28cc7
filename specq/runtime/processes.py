"""Processes that this one has started."""

from __future__ import annotations

import subprocess
from typing import Any


def reap(process: subprocess.Popen[Any], patience_s: float) -> None:
    """Wait for a process that was asked to end; kill it if it does not within so many seconds."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
