"""What a worker process takes of the machine's processors.

Rules: call `apply_cpu` before torch is imported; the thread pools that come with it read the environment only once.
Call `give_way` when the process is ready: one that gives way while it loads may wait for minutes on a busy machine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from specq.protocol import ConfigError

IDLE = 19  # the niceness that means: only what no other process wants
AUTOGROUP = Path("/proc/self/autogroup")
TASKS = Path("/proc/self/task")
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores() -> tuple[int, ...]:
    """Return the CPU ids that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def apply_cpu(cores: tuple[int, ...] = (), threads: int = 0) -> int:
    """Stay on `cores`, compute with `threads`; return the number of threads, 0: the library's own.

    Where the system cannot pin (macOS), `cores` count only for the number of threads. Raises ConfigError if a core is
    not there.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        _pin(cores)
    num_threads = threads or len(cores)
    if num_threads:
        os.environ.update(dict.fromkeys(_THREAD_SETTINGS, str(num_threads)))
    return num_threads


def give_way(nice: int) -> None:
    """Add `nice` to the niceness of this process, with all threads that it has: on Linux each thread has its own.

    Linux may divide a core among sessions first (sched(7), "The autogroup feature"), and a niceness counts only within
    one: a process that leads a session, as those of `specq up` do, sets the niceness of all of it.
    """
    if not nice:
        return
    for thread_id in _thread_ids():
        with suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + nice)
            if nice == IDLE and hasattr(os, "SCHED_IDLE"):
                os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
    if os.getsid(0) == os.getpid() and AUTOGROUP.exists():
        with suppress(OSError):  # in a container that may not
            AUTOGROUP.write_text(str(nice))


def _thread_ids() -> list[int]:
    """Return the ids of this process's threads; 0, the process, where the system does not list them."""
    return [int(path.name) for path in TASKS.iterdir()] if TASKS.exists() else [0]


def _pin(cores: tuple[int, ...]) -> None:
    missing = sorted(set(cores) - set(available_cores()))
    if missing:
        raise ConfigError(
            f"core {missing[0]} is not there; this process may use {', '.join(map(str, available_cores()))}"
        )
    os.sched_setaffinity(0, cores)
