"""The actor that runs one specq process on its node.

Rules:
- An actor receives arguments of `specq`: numbers, addresses, and paths of models and keys. It never sees a prompt.
- The process ends with its actor, also if the actor is killed: the kernel sends it SIGKILL.
- If the process ends by itself, the actor ends too, and Ray restarts both. So Ray's dashboard and state API show it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import structlog
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specq.config import environment_of_children
from specq.processes.up import first_in_child
from specq.ray.plan import ProcessSpec
from specq.runtime import reap

log = structlog.get_logger(__name__)

NAMESPACE = "specq"
PROGRAM = ("-m", "specq")
YOUNG_S, BACKOFF_S = 10.0, 5.0  # a process that ends so early starts again after a delay
TAIL_BYTES = 2000  # of a log, which have the last line
STOP_MARGIN_S = 10.0  # beyond the time that a process takes to drain


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """What an actor reports: its specification; its process's id, age and exit status (None: it runs).

    last_line: what a process that ended wrote last to its standard error, "" if that is not known.
    """

    spec: ProcessSpec
    pid: int
    age_s: float
    status: int | None
    is_stopping: bool
    last_line: str = ""


class ProcessActor:
    """Runs `python PROGRAM arguments...` until it is stopped."""

    def __init__(self, spec: ProcessSpec, program: Sequence[str] = PROGRAM) -> None:
        self.spec, self.program = spec, tuple(program)
        self._stopping = threading.Event()
        self._started, self._renewed = threading.Event(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._known = spec.brokers  # those that the running process was started with
        self._began = time.monotonic()
        threading.Thread(target=self._run, daemon=True, name="supervisor").start()
        self._started.wait()

    def __repr__(self) -> str:
        return self.spec.name  # the prefix of its lines in Ray's logs

    def _run(self) -> None:
        """Keep the process running. This thread lives as long as the actor: the process ends with it."""
        while not self._stopping.is_set():
            self._renewed.clear()
            self._process = process = self._start()
            self._started.set()
            status = process.wait()
            if not self._stopping.is_set() and not self._renewed.is_set():
                log.warning("process_ended", name=self.spec.name, status=status)
                self._stopping.wait(BACKOFF_S if time.monotonic() - self._began < YOUNG_S else 0)
                os._exit(1)

    def _start(self) -> subprocess.Popen[bytes]:
        self._began, self._known = time.monotonic(), self.spec.brokers
        brokers = ["--broker", ",".join(self._known)] if self._known else []
        return subprocess.Popen(
            [sys.executable, *self.program, *self.spec.arguments, *brokers],
            stdin=subprocess.DEVNULL,
            env=self.spec.environment(environment_of_children()),
            start_new_session=True,
            preexec_fn=first_in_child(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - only system calls
        )

    def health(self) -> ProcessHealth:
        """Return what the process is."""
        assert self._process is not None
        status, age_s = self._process.poll(), time.monotonic() - self._began
        said = "" if status is None else _last_line()
        return ProcessHealth(self.spec, self._process.pid, age_s, status, self._stopping.is_set(), said)

    def use_brokers(self, brokers: tuple[str, ...]) -> None:
        """Note the brokers for the next start. Begin anew if the process knows none of them."""
        self.spec = replace(self.spec, brokers=brokers)
        if not set(brokers) & set(self._known):
            assert self._process is not None
            self._renewed.set()
            self._process.kill()

    def stop(self, patience_s: float) -> None:
        """Ask the process to drain, and return when it has ended. Kill it after `patience_s` seconds."""
        self._stopping.set()
        assert self._process is not None
        self._process.terminate()
        reap(self._process, patience_s)


def _last_line() -> str:
    """Return the last line of the file that is this actor's standard error, and its process's (on Linux).

    Ray's own lines begin with a colon; the actor's events go to standard output.
    """
    with suppress(OSError):
        path = Path("/proc/self/fd/2").readlink()
        if path.is_file():
            with path.open("rb") as file:
                file.seek(-min(path.stat().st_size, TAIL_BYTES), os.SEEK_END)
                lines = file.read().decode("utf-8", "replace").split("\n")
            return next((line for line in reversed(lines) if line.strip() and line[0] != ":"), "")
    return ""


def start(spec: ProcessSpec, program: Sequence[str]) -> Any:
    """Return the handle of a new actor for a process, on its node. Raises ValueError if the name is taken."""
    return (
        ray.remote(ProcessActor)
        .options(
            name=spec.name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,  # `health` answers while `stop` waits
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
        )
        .remote(spec, tuple(program))
    )
