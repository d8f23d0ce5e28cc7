"""`specq` in a terminal of its own, as a user sees it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time
from typing import Self

PATIENCE_S, HANG_UP_S = 150, 10  # the first less than a test may take


class Terminal:
    """A pseudo-terminal in which a command of specq runs; `shown` is what came since the last text that was waited
    for."""

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 80, **environment: str) -> None:
        self.shown, self._status = "", None
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        own |= {"TERM": "xterm"} | environment
        self._file, inner = os.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self._file)
        self.pid = os.fork()
        if not self.pid:
            os.login_tty(inner)
            os.execve(sys.executable, [sys.executable, "-m", "specq", *arguments], own)
        os.close(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up. Kill the process if it does not end then."""
        os.close(self._file)
        deadline = time.monotonic() + HANG_UP_S
        while not self._has_ended():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.02)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, text: str) -> None:
        """Type a text."""
        os.write(self._file, text.encode())

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for(self, text: str) -> str:
        """Wait until a text is shown; return what was shown since the last one, and up to it."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            self._read(1.0)
        before, _, self.shown = self.shown.partition(text)
        return before

    def wait(self) -> int:
        """Wait for the end, and read what is shown until then; return the exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._has_ended():
            assert time.monotonic() < deadline, "it does not end"
            self._read(0.05)
        while self._read(1.0):  # the kernel passes the last output on after the end of the process
            pass
        return os.waitstatus_to_exitcode(self._status)

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def _read(self, limit_s: float) -> bool:
        """Read what is shown within so long; False if that is nothing."""
        if not select.select([self._file], [], [], limit_s)[0]:
            return False
        try:
            data = os.read(self._file, 65_536)
        except OSError:  # no process is left to write output
            return False
        self.shown += data.decode("utf-8", "replace")
        return bool(data)

    @property
    def left(self) -> list[str]:
        """What is not as it was before: line editing, the normal screen, the cursor."""
        is_as_before = {
            "attributes": termios.tcgetattr(self._file) == self.before,
            "screen": "\x1b[?1049l" in self.shown,
            "cursor": "\x1b[?25h" in self.shown[-100:],
        }
        return [name for name, holds in is_as_before.items() if not holds]
