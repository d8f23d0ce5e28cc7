"""The cores, threads and priority of a worker process, and the use by other processes.

It also reaps processes that this one has started. The measurements read /proc, so they work only on Linux.

Rules: call `apply_cpu` and `wait_asleep` before torch is imported, because its thread pools read the environment only
once. Call `give_way` when the process is ready. A process that lowers its priority while it loads may wait for minutes
on a busy machine.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.protocol import ConfigError


def reap(process: subprocess.Popen[Any], patience_s: float) -> None:
    """Wait for a process that was asked to end; kill it after `patience_s` seconds."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


IDLE = 19  # the niceness of a process that runs only on idle cores
AUTOGROUP = Path("/proc/self/autogroup")
TASKS = Path("/proc/self/task")
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores() -> tuple[int, ...]:
    """Return the CPU ids that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def available_memory() -> int | None:
    """Return the bytes of memory that are available.

    Returns None if the system does not report it.
    """
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def usual_threads() -> int:
    """Return the number of threads to compute with: what the environment says, else one for each physical core."""
    said = os.environ.get(_THREAD_SETTINGS[0], "")
    if said.isdecimal() and int(said):
        return int(said)
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    found = set[str]()
    for core in available_cores():
        try:
            found.add(Path(siblings.format(core)).read_text(encoding="ascii"))
        except OSError:
            found.add(str(core))
    return len(found)


def apply_cpu(cores: tuple[int, ...] = (), threads: int = 0) -> int:
    """Pin the process to `cores`, compute with `threads`. Return the number of threads, 0: the library's own.

    If the system cannot pin (macOS), `cores` only set the number of threads. Raises ConfigError if a core does not
    exist.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        _pin(cores)
    num_threads = threads or len(cores)
    if num_threads:
        os.environ.update(dict.fromkeys(_THREAD_SETTINGS, str(num_threads)))
    return num_threads


def wait_asleep() -> None:
    """Let threads that wait for each other sleep, unless the environment says otherwise.

    By default they compute while they wait. On a machine with other work, many small products then take several times
    as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def give_way(nice: int) -> None:
    """Add `nice` to the niceness of this process and all its threads. On Linux each thread has its own.

    Linux may divide a core among sessions first (sched(7), "The autogroup feature"). A niceness then only counts within
    a session. A process that leads a session, as those of `specq up` do, sets the niceness of the whole session.
    """
    if not nice:
        return
    for thread_id in _thread_ids():
        with suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + nice)
            if nice == IDLE and hasattr(os, "SCHED_IDLE"):
                os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
    if os.getsid(0) == os.getpid() and AUTOGROUP.exists():
        with suppress(OSError):  # not allowed in some containers
            AUTOGROUP.write_text(str(nice))


def _thread_ids() -> list[int]:
    """Return the ids of this process's threads. 0, the process, if the system does not list them."""
    return [int(path.name) for path in TASKS.iterdir()] if TASKS.exists() else [0]


def _pin(cores: tuple[int, ...]) -> None:
    missing = sorted(set(cores) - set(available_cores()))
    if missing:
        raise ConfigError(
            f"core {missing[0]} is not available; this process may use {', '.join(map(str, available_cores()))}"
        )
    os.sched_setaffinity(0, cores)


PROC = Path("/proc")
IDLE_FIELDS = slice(3, 5)  # of a line of /proc/stat: idle, waiting for a disk
NUM_FIELDS = 8  # later fields are parts of the first two


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time up to a moment.

    - at: the moment.
    - own: of each of our processes, by name.
    - busy: of all processes, and the time that the machine's host took.
    """

    at: float
    own: dict[str, float]
    busy: float

    @classmethod
    def of(
        cls, pids: Mapping[str, int], cores: Collection[int] = (), *, with_ended: bool = False, proc: Path = PROC
    ) -> Usage:
        """Return the time that our processes used, and this one as `client`. `busy` covers these cores, or all.

        - with_ended: also add the time of ended children of this process, as `ended`. Do not use it if one of `pids`
          may end meanwhile.
        """
        own = {name: cpu_s(pid) for name, pid in pids.items()} | {"client": time.process_time()}
        if with_ended:
            own["ended"] = sum(os.times()[2:4])
        return cls(time.perf_counter(), own, busy_s(cores, proc / "stat"))

    @classmethod
    def known(
        cls, pids: Mapping[str, int], cores: Collection[int], *, with_ended: bool = False, proc: Path = PROC
    ) -> Usage | None:
        """Return the result of `of`; None if the system does not count it."""
        try:
            return cls.of(pids, cores, with_ended=with_ended, proc=proc)
        except (OSError, ValueError, IndexError):
            return None

    def since(self, before: Usage) -> Usage:
        """Return the difference to an earlier measurement."""
        own = {name: seconds - before.own[name] for name, seconds in self.own.items()}
        return Usage(self.at - before.at, own, self.busy - before.busy)

    def to_dict(self) -> dict[str, float]:
        """Return the mean number of cores that each of our processes used, and all others.

        The value must be the difference of two moments.
        """
        cores = {name: round(seconds / self.at, 3) for name, seconds in self.own.items()}
        return cores | {"others": round(max(self.busy - sum(self.own.values()), 0.0) / self.at, 3)}


def others_cores(before: Usage | None, after: Usage | None) -> float | None:
    """Return how many cores other processes used between two moments, on average; None if unknown."""
    return after.since(before).to_dict()["others"] if before and after else None


def cpu_s(pid: int) -> float:
    """Return the processor time of a process's threads, in seconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def busy_s(cores: Collection[int] = (), path: Path = PROC / "stat") -> float:
    """Return the total busy time of these cores, or of all if empty, in seconds.

    Raises OSError or ValueError if the system does not count each of them.
    """
    wanted = {f"cpu{core}" for core in cores} or {"cpu"}
    parts = (line.split() for line in path.read_text().splitlines())
    ticks = [[int(value) for value in values][:NUM_FIELDS] for name, *values in filter(None, parts) if name in wanted]
    if len(ticks) < len(wanted):
        raise ValueError(f"{path} does not count all of {sorted(wanted)}")
    return sum(sum(each) - sum(each[IDLE_FIELDS]) for each in ticks) / os.sysconf("SC_CLK_TCK")
