"""Logging: structlog to standard error, as `event key=value` lines or as JSON, one object a line.

Rule: an event is a past-tense name with fields (`draft_verified`, `num_accepted=3`); never prompts, texts or keys.

What a worker does before it is ready, and who of a group is, as lines for whoever waits in front of a terminal.
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
    """Standard error, as long as it can be written: a disk that the log has filled stops no process."""

    def write(self, line: str) -> None:
        with suppress(OSError, AttributeError):  # AttributeError: None, since whoever started the process has closed it
            sys.stderr.write(line)

    def flush(self) -> None:
        with suppress(OSError, AttributeError):
            sys.stderr.flush()


def traced(error: BaseException) -> dict[str, str]:
    """Return the fields that say what an unexpected error is and where it was raised. Not its message: that may quote
    what users sent, which is not to be logged."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return {
        "error": type(error).__name__,
        "where": " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames),
    }


def _renderer(*, as_json: bool) -> Any:
    if as_json:
        return structlog.processors.JSONRenderer()
    return structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], sort_keys=False)


NOTICED_S = 0.1  # waited for less than that
EVERY_S = 5.0  # between two lines about those that are not ready

Tell = Callable[[str], object]


def teller(name: str, *, wanted: bool) -> Tell:
    """Return what says what a worker does now: on standard output if that is `wanted`, else on standard error if that
    is a terminal."""
    if not wanted and not sys.stderr.isatty():
        return bool
    return lambda what: click.echo(f"{name}: {what}", err=not wanted)


class Readiness:
    """Says who has become ready, and every few seconds for whom the group waits. Times in seconds."""

    def __init__(self, names: Collection[str], tell: Tell, started: float) -> None:
        self._missing, self._tell, self._started = list(names), tell, started
        self._told = started

    def note(self, ready: Collection[str], now: float) -> bool:
        """Take the names of those that are ready by now; True if all are. Of one that nobody waited for nothing is
        said."""
        elapsed = now - self._started
        for name in [name for name in self._missing if name in ready]:
            self._missing.remove(name)
            if elapsed >= NOTICED_S:
                self._tell(f"{name}: ready after {elapsed:.1f} s")
        if self._missing and now >= self._told + EVERY_S:
            self._told = now
            self._tell(f"waiting for {', '.join(self._missing)}: {elapsed:.0f} s so far")
        return not self._missing
