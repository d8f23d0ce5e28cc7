"""Builds C kernels at first use and keeps the libraries in the user's cache.

The file name hashes sources, flags, compiler and processor, so a change of any of them builds anew. Without a C compiler
there is no library, and whoever asked takes its portable path.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import structlog

from specq.config import cache_dir
from specq.runtime.whole_files import whole_file

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-pthread", "-shared", "-fPIC", "-lm")
COMPILE_TIMEOUT_S = 120.0
MOST_LINES = 3  # of what a compiler says
PORTABLE = "without it the portable path computes, several times slower"
NO_COMPILER = f"no C compiler; {PORTABLE}: install gcc or clang"

log = structlog.get_logger()


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled library of a C file, which may include others of its folder, built if need be; None if this
    machine cannot build it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("kernels_unavailable", source=source.name, reason=NO_COMPILER)
        return None
    try:
        return ctypes.CDLL(str(built(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("kernels_unavailable", source=source.name, reason=_reason(error))
        return None


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    """Return what was in the way, in the compiler's own words where it failed, and what that means."""
    said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in said.splitlines() if line.strip()]
    return f"{'; '.join(lines[:MOST_LINES])}. It is built in {cache_dir()} (SPECQ_CACHE); {PORTABLE}"


def built(source: Path, compiler: str) -> Path:
    """Return the path of the library for this machine, built unless it is there."""
    directory = cache_dir() / "kernels"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{_digest(source, compiler)}.so"
    if not path.exists():
        _build(source, compiler, path)
    return path


def _build(source: Path, compiler: str, path: Path) -> None:
    """Compile elsewhere and move the library into place, so that processes may race."""
    with whole_file(path) as temporary:
        command = [compiler, str(source), "-o", str(temporary), *FLAGS]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)


def _digest(source: Path, compiler: str) -> str:
    """Hash all that the library depends on."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S).stdout
    parts = [version, processor().encode(), " ".join(FLAGS).encode(), source.name.encode()]
    parts += [path.read_bytes() for path in sorted(source.parent.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def processor() -> str:
    """Name the processor's instruction set as well as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
