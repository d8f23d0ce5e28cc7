"""What a figure was measured on: hardware, versions, commit."""

from __future__ import annotations

import datetime as dt
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specq.runtime import available_cores

_PACKAGES = ("specq", "numpy", "orjson", "pyzmq", "tokenizers", "torch", "transformers")


def describe(command: str) -> dict[str, Any]:
    """Return the circumstances of a run as JSON-able values."""
    return {
        "command": command,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": {"cpu": cpu_model(), "cores": len(available_cores()), "machine": platform.machine()},
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or "unknown"


def commit() -> str:
    """Return the commit of the code that runs, with + if it was changed since; "" outside a repository."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
