"""Standard input as part of a question on the command line.

    read_all    reads to the end; used if the user requested standard input
    read_piped  reads piped text only; ignores a terminal and a pipe without data

Rule: test runners and ssh may leave an open pipe on standard input without writing. specq does not wait for such a pipe
unless the user requests it.
"""

from __future__ import annotations

import io
import select
import sys
from collections.abc import Callable
from typing import TextIO

import click

FIRST_S = 5.0  # time for the first byte to arrive
_NOTHING_CAME = (
    "specq: received no standard input within {:g} s; continuing without it (use - in the question to wait for it, or "
    "< /dev/null for empty input)"
)


def is_terminal() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_all() -> str:
    """Return all of standard input. Raises UsageError if it is closed, unreadable, or not valid text."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed; redirect a file or a pipe to it")
    try:
        return _text(sys.stdin)
    except OSError as error:
        raise click.UsageError(f"cannot read standard input: {error.strerror or error}") from None


def read_piped(tell: Callable[[str], object], first_s: float = FIRST_S) -> str:
    """Return the text piped or redirected to this process; "" for a terminal, or if it is closed or unreadable.

    Returns "" and calls `tell` with a message if no data arrives within `first_s` seconds. Otherwise reads to the end.
    Raises UsageError for data that is not valid text.
    """
    if sys.stdin is None or is_terminal():
        return ""
    if not _has_begun(sys.stdin, first_s):
        tell(_NOTHING_CAME.format(first_s))
        return ""
    try:
        return _text(sys.stdin)
    except OSError:  # open for writing only, as `nohup` does
        return ""


def _text(stream: TextIO) -> str:
    try:
        return stream.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not valid {error.encoding}: {error.reason}") from None


def _has_begun(stream: TextIO, first_s: float) -> bool:
    """Wait for data or the end of input; False if neither arrives in time."""
    try:
        return bool(select.select([stream], [], [], first_s)[0])
    except io.UnsupportedOperation:  # text in memory is always ready
        return True
