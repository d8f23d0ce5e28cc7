"""What else this machine does while the doctor measures: how many processors other processes use, and whether specq
runs here already.

Rule: unknown is None, never a guess; where the system does not count seconds by processor, the load average of the last
minute stands for them.
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
    """Return how many of the processors other processes used between two moments, as a mean, or the `load`; None where
    nothing says it."""
    used = others_cores(before, after)
    used = load if used is None else used
    return None if used is None else min(used, float(num_cores))


def usage(cores: Sequence[int], proc: Path = PROC) -> Usage | None:
    """Return what this process, with the children that it had, and all others have taken of the processors; None where
    that is not known."""
    return Usage.known({}, cores, with_ended=True, proc=proc)


def load_average() -> float | None:
    """Return how many processes computed in the last minute, as a mean; None where the system does not say it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def running(proc: Path = PROC) -> str:
    """Return which processes of specq run here already, in words; "" for none, or where the system does not list
    processes."""
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
    """Return which part of specq a command line runs, one of ROLES, or ""."""
    at = next((i for i, word in enumerate(arguments[:4]) if Path(word).name == "specq"), None)
    follows = arguments[at + 1] if at is not None and at + 1 < len(arguments) else ""
    return follows if follows in ROLES else ""
