"""The load from other processes while the doctor measures, and whether specq runs here already.

Rule: an unknown value is None, never a guess. If the system has no counts by processor, the last minute's load average
is used.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from specq.runtime.usage import PROC, Usage, others_cores

ROLES = ("broker", "worker", "serve")


def used_by_others(
    before: Usage | None, after: Usage | None, num_cores: int, load: float | None = None
) -> float | None:
    """Return the mean number of processors that other processes used between two moments, or the `load`.

    Returns None if neither is known.
    """
    used = others_cores(before, after)
    used = load if used is None else used
    return None if used is None else min(used, float(num_cores))


def usage(cores: Sequence[int], proc: Path = PROC) -> Usage | None:
    """Return the processor time of this process with its ended children, and of all others.

    Returns None if unknown.
    """
    return Usage.known({}, cores, with_ended=True, proc=proc)


def load_average() -> float | None:
    """Return the mean number of computing processes in the last minute.

    Returns None if the system does not report it.
    """
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def running(proc: Path = PROC) -> str:
    """Return the running processes of specq here, in words.

    Returns "" for none, or if the system does not list processes.
    """
    found = Counter(role for arguments in _others(proc) if (role := role_of(arguments)))
    return ", ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in sorted(found.items()))


def _others(proc: Path) -> Iterator[list[str]]:
    for directory in proc.glob("[0-9]*"):
        if directory.name != str(os.getpid()):
            try:
                yield (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue


def role_of(arguments: Sequence[str]) -> str:
    """Return the part of specq that a command line runs, one of ROLES, or ""."""
    at = next((i for i, word in enumerate(arguments[:4]) if Path(word).name == "specq"), None)
    follows = arguments[at + 1] if at is not None and at + 1 < len(arguments) else ""
    return follows if follows in ROLES else ""
