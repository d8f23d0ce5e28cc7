"""Runs a module with a wall clock that a file sets: python -m tests.journal.set_clock FILE MODULE ARGUMENTS...

The file holds the seconds by which the wall clock is ahead. The journal is looked through for old results all the time.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from specq.journal import threads

EXPIRE_S = 0.05


def main(file: str, module: str, *arguments: str) -> None:
    """Run the module as a program."""
    ahead, real_s, real_ns = Path(file), time.time, time.time_ns
    time.time = lambda: real_s() + float(ahead.read_text())
    time.time_ns = lambda: real_ns() + int(float(ahead.read_text()) * 1e9)
    threads.EXPIRE_S = EXPIRE_S
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
