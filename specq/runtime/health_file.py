"""The state of a broker or worker in the file SPECQ_HEALTH, for probes: a command of specq takes a second to start.

- The content is one line: `loading`, `waiting` (for a broker), `ready`, `draining`, or another state of a worker.
- The main loop writes it with each heartbeat. So an old file means that this loop does not run any more.
"""

from __future__ import annotations

import os

import structlog

from specq.config import health_path
from specq.protocol import ConfigError
from specq.runtime.whole_files import whole_file

log = structlog.get_logger(__name__)


class HealthFile:
    """The file. Without SPECQ_HEALTH there is none, and nothing is written."""

    def __init__(self) -> None:
        self._path = health_path()
        self._state = ""  # as written

    def begin(self) -> None:
        """Write `loading`, over what an earlier process left. Raises ConfigError if the file cannot be written."""
        try:
            self._write("loading")
        except OSError as error:
            raise ConfigError(f"cannot write the health file {self._path}: {error.strerror}") from None

    def note(self, state: str) -> None:
        """Write the state, or only the time if it is the same."""
        try:
            self._write(state)
        except OSError as error:  # the process goes on; its probes will fail
            log.warning("health_file_failed", reason=error.strerror)

    def _write(self, state: str) -> None:
        if self._path is None:
            return
        if state == self._state:
            os.utime(self._path)
            return
        with whole_file(self._path) as temporary:
            temporary.write_text(f"{state}\n", "ascii")
        self._state = state
