"""specq's own processes for a benchmark: `specq up` on a free port, waited for, and always stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Self

from specq.client import Client, count_ready
from specq.config import free_address
from specq.protocol import EngineError, JobError
from specq.transport import own_keys

_STOP_S = 20.0
_POLL_S = 0.2
_MOST_OUTPUT = 1 << 20


class Servers:
    """A broker, one target and some drafters, and a client of theirs, with `keys` as of `specq up`.

    Raises ConfigError if one of them would be without its key.
    """

    def __init__(self, model: str, draft_model: str, drafters: int, keys: str = "") -> None:
        check_keys(keys, "broker", "target", *(["draft"] if drafters else []), "client")
        self.address, self.keys = free_address(), keys
        self.drafters = drafters
        self._arguments = ["--broker", self.address, "--targets", "1", "--drafters", str(drafters)]
        self._arguments += ["--model", model, "--draft-model", draft_model, *keys_option(keys)]

    def __enter__(self) -> Self:
        self.client = Client(self.address, timeout_s=10.0, keys=self.keys)
        self._folder = tempfile.TemporaryDirectory()
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specq", "up", "--journal", f"{self._folder.name}/journal", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._folder.cleanup()

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        """Wait until all workers are ready; raises EngineError, with what they printed, if they end or are late."""
        deadline = time.monotonic() + timeout_s
        with Client(self.address, timeout_s=_POLL_S, keys=self.keys) as client:
            while not self._ready(client):
                if self._process.poll() is not None:
                    raise EngineError(f"specq up ended with status {self._process.returncode}: {self.output()[-2000:]}")
                if time.monotonic() > deadline:
                    raise EngineError(f"specq up was not ready within {timeout_s:g} s: {self.output()[-2000:]}")
                time.sleep(_POLL_S)

    def _ready(self, client: Client) -> bool:
        try:
            targets, drafters = count_ready(client.status())
        except JobError:
            return False
        return targets >= 1 and drafters >= self.drafters

    def output(self) -> str:
        """Return what the processes have printed so far."""
        return os.pread(self._output.fileno(), _MOST_OUTPUT, 0).decode(errors="replace")


def check_keys(keys: str, *roles: str) -> None:
    """Raise ConfigError unless there is a key of each role, or none at all is asked for."""
    for role in roles if keys else ():
        own_keys(keys, role)


def keys_option(keys: str) -> list[str]:
    """Return the option that gives a process of specq these keys."""
    return ["--keys", keys] if keys else []
