"""The results before a run was interrupted by Ctrl-C or SIGTERM (as sent by `timeout`).

An exception carries them to the report, together with the cause of the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CutShortError(BaseException):
    """`found`: the results so far; `stop`: the exception that ended the run."""

    def __init__(self, found: dict[str, Any], stop: BaseException) -> None:
        super().__init__("cut short")
        self.found, self.stop = found | {"error": "cut short"}, stop


@contextmanager
def keeping(found: dict[str, Any]) -> Iterator[None]:
    """Attach the results so far, a dict that the body fills, to an exception that ends the run."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        raise CutShortError(found, stop) from None
