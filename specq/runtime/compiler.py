"""Build C kernels at first use and keep the libraries in the user's cache.

The file name is a hash of sources, flags, compiler and processor. So a change of any of them causes a new build. Beside
each library is a hash of its bytes. A library that a power loss or a full disk left incomplete is built again. Loading
it would crash the process. Without a C compiler there is no library, and the caller uses its portable path.

The module also has arrays with known addresses, for calls of C. NumPy takes longer to return an address than to copy a
few hundred numbers.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from specq.config import cache_dir
from specq.runtime.usage import available_cores
from specq.runtime.whole_files import whole_file

LEAST = 64  # elements


class Buffer:
    """An array that grows, and its address."""

    __slots__ = ("address", "array")

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.array: npt.NDArray[Any] = np.empty(0, dtype)
        self.address = 0

    def room(self, size: int) -> npt.NDArray[Any]:
        """Return the first `size` elements. If the array must grow, its old content is lost."""
        if size > len(self.array) or not self.address:
            self.array = np.empty(max(LEAST, 2 * size), self.array.dtype)
            self.address = self.array.ctypes.data
        return self.array[:size]

    def take(self, values: npt.ArrayLike, size: int) -> int:
        """Copy values into the array; return the address."""
        self.room(size)[:] = values
        return self.address


FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-pthread", "-shared", "-fPIC", "-lm")
COMPILE_TIMEOUT_S = 120.0
MOST_LINES = 3  # most lines of a compiler's output in a message
PORTABLE = "without it specq uses the portable path, which is several times slower"
NO_COMPILER = f"no C compiler; {PORTABLE}: install gcc or clang"

log = structlog.get_logger()


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled library of a C file, built if needed. None if this machine cannot build it.

    The file may include others of its folder.
    """
    found = library_or_reason(source)
    if isinstance(found, str):
        log.warning("kernel_build_failed", source=source.name, reason=found)
        return None
    return found


def library_or_reason(source: Path) -> ctypes.CDLL | str:
    """Return the result of `library`, or the reason why there is none."""
    compiler = find_compiler()
    if not compiler:
        return NO_COMPILER
    try:
        return ctypes.CDLL(str(built(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        return _reason(error)


def kernel_sources() -> list[Path]:
    """Return the C files of all libraries of specq."""
    return sorted(Path(__file__).parents[1].rglob("kernels/*.c"))


def build_ahead() -> None:
    """Begin to build all libraries that are missing, in threads. `library` waits for one that is being built.

    Call it before `apply_cpu`, so that the compiler may use all cores. Reasons for a failure are left to `library`.
    """
    compiler = find_compiler()
    if compiler:
        pool = ThreadPoolExecutor(len(available_cores()))
        for source in kernel_sources():
            pool.submit(built, source, compiler)
        pool.shutdown(wait=False)


def has_kernels() -> bool:
    """Return whether this cache already has a built library."""
    return any((cache_dir() / "kernels").glob("*.so"))


def find_compiler() -> str:
    """Return the path of this machine's C compiler, "" if there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    """Return the cause of a failed build, with the compiler's own output, and the consequence."""
    said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in said.splitlines() if line.strip()]
    return f"{'; '.join(lines[:MOST_LINES])}. It is built in {cache_dir()} (SPECQ_CACHE); {PORTABLE}"


def built(source: Path, compiler: str) -> Path:
    """Return the path of the library for this machine, built unless it exists and is complete.

    If another thread or process builds it, wait for that.
    """
    directory = cache_dir() / "kernels"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{_digest(source, compiler)}.so"
    if not _is_whole(path):
        with path.with_suffix(".lock").open("wb") as file:
            with suppress(OSError):  # a file system without locks: built twice, which harms nothing
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_whole(path):
                _build(source, compiler, path)
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a library is exactly as it was built."""
    noted = _note(path)
    return path.exists() and noted.exists() and noted.read_bytes() == _hash(path)


def _note(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _build(source: Path, compiler: str, path: Path) -> None:
    """Compile elsewhere and move the library into place, so that processes may race."""
    with whole_file(path) as temporary:
        command = [compiler, str(source), "-o", str(temporary), *FLAGS]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        noted = _hash(temporary)
    with whole_file(_note(path)) as temporary:
        temporary.write_bytes(noted)


def _digest(source: Path, compiler: str) -> str:
    """Hash everything that the library depends on."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S).stdout
    parts = [version, processor().encode(), " ".join(FLAGS).encode(), source.name.encode()]
    parts += [path.read_bytes() for path in sorted(source.parent.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def processor() -> str:
    """Return the processor's name and instruction sets, as far as the system reports them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
