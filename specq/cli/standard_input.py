"""Standard input as a part of what is asked on the command line.

    read_all    for a user who has asked for it: waits until it ends
    read_piped  for one who has not: a terminal is left alone, and a pipe that nobody writes to is not waited for

Rule: whoever starts a process may leave it an open pipe for standard input and never write to it, as test runners and
ssh do. Nothing waits for such a pipe unless the user asked for that.
"""

from __future__ import annotations

import io
import select
import sys
from collections.abc import Callable
from typing import TextIO

import click

FIRST_S = 5.0  # for the first byte to come
_NOTHING_CAME = (
    "specq: nothing came on standard input within {:g} s; going on without it (- in the question waits for it, < "
    "/dev/null says that nothing will come)"
)


def is_terminal() -> bool:
    """Return whether a user types there."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_all() -> str:
    """Return all of standard input; raises UsageError if it is closed, cannot be read, or is not valid text."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    try:
        return _text(sys.stdin)
    except OSError as error:
        raise click.UsageError(f"standard input cannot be read: {error.strerror or error}") from None


def read_piped(tell: Callable[[str], object], first_s: float = FIRST_S) -> str:
    """Return what was piped or redirected to this process; "" for a terminal, and where standard input is closed or
    cannot be read.

    Where nothing comes within `first_s` seconds, "" is returned, and `tell` receives a line that says so. What has
    begun to come is read to its end. Raises UsageError for what is not valid text.
    """
    if sys.stdin is None or is_terminal():
        return ""
    if not _has_begun(sys.stdin, first_s):
        tell(_NOTHING_CAME.format(first_s))
        return ""
    try:
        return _text(sys.stdin)
    except OSError:  # open for writing only, as `nohup` leaves it
        return ""


def _text(stream: TextIO) -> str:
    try:
        return stream.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not valid {error.encoding}: {error.reason}") from None


def _has_begun(stream: TextIO, first_s: float) -> bool:
    """Wait until there is something to read, or the end; False if neither comes in time."""
    try:
        return bool(select.select([stream], [], [], first_s)[0])
    except io.UnsupportedOperation:  # a text in memory: it is there
        return True
