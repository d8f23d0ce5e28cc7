"""Standard output and other outputs that fail, and standard input.

Outputs fail for a full disk, a directory instead of a file, or a pipe without a reader. Rule: after a failed write, the
command ends with a line on standard error and status 2. A pipe without a reader ends it silently, with status 1.
Standard output is flushed before the command ends. A failure at interpreter exit would print a traceback.

Rule of input: test runners and ssh may leave an open pipe on standard input without writing. specq does not wait for
such a pipe unless the user requests it.

    read_all    reads to the end; used if the user requested standard input
    read_piped  reads piped text only; ignores a terminal and a pipe without data"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

UNWRITABLE, UNREAD = 2, 1  # exit statuses
STDOUT = "standard output"
# How native libraries report an operating system error: safetensors and tokenizers; torch.
_FOREIGN = re.compile(r"\(os error (?P<number>\d+)\)|failed with strerror: (?P<reason>[^\n]+)")


class _StandardOutput(io.FileIO):
    """Standard output whose errors have `filename` STDOUT."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT) from None


@contextmanager
def unwritable_said() -> Iterator[None]:
    """Turn unhandled operating system errors into one line and SystemExit, including errors of flushing stdout."""
    with _named():
        try:
            yield
            sys.stdout.flush()
        except SystemExit as ending:
            sys.exit(_end(error) if (error := _unflushed(sys.stdout)) is not None else ending.code)
        except Exception as error:
            if _system_error(error) is None:
                raise
            _unflushed(sys.stdout)
            sys.exit(_end(error))
        finally:
            if sys.stderr is not None:
                _unflushed(sys.stderr)


@contextmanager
def _named() -> Iterator[None]:
    """Replace standard output by `_StandardOutput`, unless it was replaced already, as tests do.

    If the parent process closed standard output, writes fail. If it closed standard error, writes are dropped.
    """
    before: Any = sys.stdout
    if before is None:
        raw = _StandardOutput(os.open(os.devnull, os.O_RDONLY), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8")
    elif id(before) == id(sys.__stdout__):
        before.flush()
        raw = _StandardOutput(before.fileno(), "w", closefd=False)
        how = {name: getattr(before, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), **how)
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_WRONLY), "w", closefd=False), "utf-8")
    try:
        yield
    finally:
        sys.stdout = before


def _unflushed(stream: TextIO) -> OSError | None:
    """Flush a stream and return the error, if any.

    After an error the buffered data is dropped, so the interpreter exits without a traceback.
    """
    try:
        stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return error
    return None


def _end(error: Exception) -> int:
    """Print which output cannot be written, unless its reader closed the pipe. Return the exit status."""
    if isinstance(error, BrokenPipeError):
        return UNREAD
    with suppress(OSError):  # standard error may be full too
        click.echo(f"specq: {_line(error)}", err=True)
    return UNWRITABLE


def _line(error: Exception) -> str:
    found = _system_error(error) or error
    reason = getattr(found, "strerror", None) or str(error)
    path = getattr(found, "filename", None)
    if path is not None:
        return f"cannot write {STDOUT}: {reason}" if path == STDOUT else f"{path}: {reason}"
    from specq.runtime import traced  # here, since its imports are slow

    return f"cannot read or write a file: {reason} (at {traced(error)['where']})"


def _system_error(error: Exception) -> OSError | None:
    """Return the operating system error that an exception is or reports; else None."""
    if isinstance(error, OSError):
        return error
    if (match := _FOREIGN.search(str(error))) is None:
        return None
    number = int(match["number"] or errno.EIO)
    return OSError(number, match["reason"] or os.strerror(number))


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
