"""Processes for measuring: started with the same Python, read from, and always stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specq.protocol import EngineError

PYTHON = (sys.executable, str(Path(__file__).parent / "__main__.py"))  # before the name of a module and its arguments


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module with these arguments until the block ends; its output can be read."""
    started = subprocess.Popen([*PYTHON, module, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def first_line(started: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints; raises EngineError if it ends without one."""
    assert started.stdout is not None, "it was asked for"
    line = started.stdout.readline().strip()
    if not line:
        raise EngineError(f"a process for measuring ended with status {started.wait()}")
    return line


def output(started: subprocess.Popen[str], timeout_s: float) -> str:
    """Return the whole output of a process; raises EngineError if it fails or takes longer than `timeout_s`."""
    try:
        printed, _ = started.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise EngineError(f"measuring took longer than {timeout_s:g} s") from None
    if started.returncode:
        raise EngineError(f"the measuring process ended with status {started.returncode}")
    return printed


def cpu_seconds(pid: int) -> float | None:
    """Return the processor seconds that a process has used so far; None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
