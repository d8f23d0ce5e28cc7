"""Run generated code with its tests, in a separate process with limits; never in this one.

    processor time, memory, wall-clock time   bounded. The process group is killed in any case
    files, sockets, processes                 Python's audit hook refuses to write, delete, connect and start any, as
                                              far as Python announces it

Rule: this prevents damage by a model's mistakes. It is not a sandbox against hostile code.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

CPU_S, WALL_S = 5, 20
MEMORY_BYTES = 1 << 30
PASSED = 86  # a status that code does not end with by chance, as by `exit()`
_LIMITS = {"CPU": CPU_S, "AS": MEMORY_BYTES, "FSIZE": 0, "CORE": 0}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = ("os.", "shutil.", "socket.", "subprocess.", "pty.", "signal.", "resource.")
# Imports need these, listing folders, and loops of asyncio, which make no connection.
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv", "socket.__new__")


def passes(program: str) -> bool:
    """Return whether a program runs to its end without an error. The same program gets the same answer."""
    with TemporaryDirectory(prefix="specq-code-") as folder:
        started = subprocess.Popen(
            [sys.executable, "-BPs", __file__], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            started.communicate(program.encode("utf-8", "replace"), WALL_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    return started.returncode == PASSED


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    is_write = event == "open" and bool(arguments[2] & _WRITES)
    if is_write or (event.startswith(_REFUSED) and event not in _HARMLESS):
        raise PermissionError(f"generated code may not do this: {event}")


def _run(program: str) -> None:
    """Run the program in this process, and end the process."""
    for name, most in _LIMITS.items():
        with suppress(ValueError, OSError):  # macOS has no limit of memory
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    random.seed(0)
    status = 1
    try:
        code = compile(program, "<generated>", "exec", dont_inherit=True)  # not this file's `annotations`
        module = sys.modules["generated"] = ModuleType("generated")  # dataclasses look it up
        sys.addaudithook(_refuse)
        exec(code, vars(module))  # noqa: S102 - see above
        status = PASSED
    finally:
        os._exit(status)


if __name__ == "__main__":
    _run(sys.stdin.read())
