"""Logging: structlog to standard error, as `event key=value` lines or as JSON, one object a line.

Rule: an event is a past-tense name with fields (`draft_verified`, `num_accepted=3`); never prompts, texts or keys.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

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
