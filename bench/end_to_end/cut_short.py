"""What was measured before a run was cut short, by Ctrl-C or SIGTERM (as of `timeout`): it goes to the report with
what ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CutShortError(BaseException):
    """`found`: what was measured until then; `stop`: what ended the run."""

    def __init__(self, found: dict[str, Any], stop: BaseException) -> None:
        super().__init__("cut short")
        self.found, self.stop = found | {"error": "cut short"}, stop


@contextmanager
def keeping(found: dict[str, Any]) -> Iterator[None]:
    """Let what was found by then go with the end of the run; a dict that is filled within."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        raise CutShortError(found, stop) from None
