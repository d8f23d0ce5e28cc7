"""Logging: structlog to standard error, as `event key=value` lines or as JSON, one object per line.

Rule: an event is a past-tense name with fields (`draft_verified`, `num_accepted=3`). It never has prompts, texts or
keys.

It also prints the start-up progress of workers for a user at a terminal.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

import click
import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str = "info", *, as_json: bool = False) -> None:
    """Send the events of `level` and above to standard error, for the whole process."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _renderer(as_json=as_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Lossy())),
        cache_logger_on_first_use=True,
    )


class _Lossy:
    """Standard error, as long as it can be written. A disk that is full of logs must not stop a process."""

    def write(self, line: str) -> None:
        with suppress(OSError, AttributeError):  # AttributeError: None, since the parent process has closed it
            sys.stderr.write(line)

    def flush(self) -> None:
        with suppress(OSError, AttributeError):
            sys.stderr.flush()


def traced(error: BaseException) -> dict[str, str]:
    """Return the fields that name an unexpected error and where it was raised.

    They leave out its message, which may quote user input. User input must not be logged.
    """
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return {
        "error": type(error).__name__,
        "where": " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames),
    }


def _renderer(*, as_json: bool) -> Any:
    if as_json:
        return structlog.processors.JSONRenderer()
    return structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], sort_keys=False)


NOTICED_S = 0.1  # shorter waits are not reported
EVERY_S = 5.0  # between two lines about members that are not ready

Tell = Callable[[str], object]


def teller(name: str, *, wanted: bool) -> Tell:
    """Return a function that prints the progress of a worker.

    It prints to standard output if `wanted`, else to standard error if that is a terminal.
    """
    if not wanted and not sys.stderr.isatty():
        return bool
    return lambda what: click.echo(f"{name}: {what}", err=not wanted)


class Readiness:
    """Prints which members of a group are ready, and every few seconds which are not. Times in seconds."""

    def __init__(self, names: Collection[str], tell: Tell, started: float) -> None:
        self._missing, self._tell, self._started = list(names), tell, started
        self._told = started

    def note(self, ready: Collection[str], now: float) -> bool:
        """Record the names of the members that are ready now; return True if all are.

        Members that are not in the group print no line.
        """
        elapsed = now - self._started
        for name in [name for name in self._missing if name in ready]:
            self._missing.remove(name)
            if elapsed >= NOTICED_S:
                self._tell(f"{name}: ready after {elapsed:.1f} s")
        if self._missing and now >= self._told + EVERY_S:
            self._told = now
            self._tell(f"waiting for {', '.join(self._missing)}: {elapsed:.0f} s so far")
        return not self._missing
