"""Keys as they are typed, without Enter. The terminal is put back as it was, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator

_SEQUENCES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b": "escape"}
_NAMES = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\x04": "q"}


class Keyboard:
    """The terminal that standard input is."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def keys(self, timeout_s: float) -> list[str]:
        """Wait for keys at most so long; return what was typed: characters, or the names of other keys."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return []
        typed = os.read(self._fd, 1024)
        if not typed:  # the terminal is gone
            return ["q"]
        if typed in _SEQUENCES:
            return [_SEQUENCES[typed]]
        if typed.startswith(b"\x1b"):
            return []
        return [_NAMES.get(one, one) for one in typed.decode("utf-8", "replace")]


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Read keys one by one, and do not show them."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
