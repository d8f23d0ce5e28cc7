"""The memory of processes from /proc; empty on other systems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_FIELDS = {"VmHWM": "peak_mb", "VmRSS": "now_mb"}


def memory_of(processes: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return megabytes (10^6 bytes) of resident memory by the name of each process: the most so far, and now."""
    return {name: found for name, pid in processes.items() if (found := _read(pid))}


def _read(pid: int) -> dict[str, float]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.partition(":")[0] in _FIELDS)
    return {_FIELDS[name]: round(int(value.split()[0]) * 1024 / 1e6, 1) for name, value in pairs}
