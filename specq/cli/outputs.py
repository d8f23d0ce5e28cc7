"""Outputs that cannot be written: a full disk, a directory in the place of a file, a pipe that nobody reads any more.

Rule: whatever writes, and wherever it fails, the command ends with one line on standard error and status 2; a pipe
without a reader ends it quietly, with status 1. Standard output is written out before the command ends: a failure at
the exit of the interpreter would be a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

UNWRITABLE, UNREAD = 2, 1  # exit statuses
STDOUT = "standard output"
# How libraries that are not in Python pass on an error of the system: safetensors, tokenizers; torch.
_FOREIGN = re.compile(r"\(os error (?P<number>\d+)\)|failed with strerror: (?P<reason>[^\n]+)")


class _StandardOutput(io.FileIO):
    """Standard output, whose errors say so: `filename` is STDOUT."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT) from None


@contextmanager
def unwritable_said() -> Iterator[None]:
    """Turn errors of the system that nobody has handled into a line and SystemExit, those of writing out standard
    output among them."""
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
    """Make standard output one whose errors say so, unless something took its place, as tests do. Where who started
    this has closed it, writing fails instead of being left out. What goes to a standard error that is closed is left
    out."""
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
    """Write out a stream. Return why it cannot be written; then what it still holds is dropped: the interpreter ends
    quietly."""
    try:
        stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return error
    return None


def _end(error: Exception) -> int:
    """Say what cannot be written, unless a reader has left; return the exit status."""
    if isinstance(error, BrokenPipeError):
        return UNREAD
    with suppress(OSError):  # standard error may be as full
        click.echo(f"specq: {_line(error)}", err=True)
    return UNWRITABLE


def _line(error: Exception) -> str:
    found = _system_error(error) or error
    reason = getattr(found, "strerror", None) or str(error)
    path = getattr(found, "filename", None)
    if path is not None:
        return f"cannot write {STDOUT}: {reason}" if path == STDOUT else f"{path}: {reason}"
    from specq.runtime import traced  # here, since it brings much along

    return f"a file cannot be read or written: {reason} (at {traced(error)['where']})"


def _system_error(error: Exception) -> OSError | None:
    """Return the error of the system that an exception is or passes on; None if it is another."""
    if isinstance(error, OSError):
        return error
    if (match := _FOREIGN.search(str(error))) is None:
        return None
    number = int(match["number"] or errno.EIO)
    return OSError(number, match["reason"] or os.strerror(number))
