"""Types of command-line options that several packages use: numbers, and output paths that are tested at once."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from specq.protocol import ConfigError

_PROBE = bytes(4096)


class Number(click.FloatRange):
    """A number within a range, neither NaN nor infinity."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a {'' if math.isnan(number) else 'finite '}number.", param, ctx)
        return number


class OutFile(click.Path):
    """A file to write, as a `Path`. A file that cannot be written is refused.

    - makes_directory: whether a missing directory is made.
    - or_stdout: whether - means standard output; the value is then a string.
    """

    def __init__(self, *, makes_directory: bool = False, or_stdout: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=or_stdout, path_type=str if or_stdout else Path)
        self._makes_directory = makes_directory

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        out: Any = super().convert(value, param, ctx)
        path = Path(out)
        if self.allow_dash and out == "-":
            return out
        folder = _existing(path.parent) if self._makes_directory else path.parent
        if not folder.is_dir():
            self.fail(f"{folder} is not a directory; create it first.", param, ctx)
        try:
            _try(path, folder)
        except OSError as error:
            self.fail(f"{path} cannot be written: {error.strerror}.", param, ctx)
        return out


class OutFolder(click.Path):
    """A directory to write into, as a `Path`, made if missing. A directory that cannot be written is refused."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        out: Any = super().convert(value, param, ctx)
        folder = _existing(out)
        if not folder.is_dir():
            self.fail(f"{folder} is not a directory.", param, ctx)
        try:
            _try_in(folder)
        except OSError as error:
            self.fail(f"{out} cannot be written: {error.strerror}.", param, ctx)
        return out


@contextmanager
def writing(out: str | Path) -> Iterator[None]:
    """Turn the system's errors about writing to `out` into ConfigError. A broken pipe stays a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(cannot_write(out, error)) from None


def cannot_write(out: str | Path, error: OSError) -> str:
    """Return the message that a file or directory cannot be written."""
    return f"cannot write {out}: {error.strerror or error}"


def _existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    return next(above for above in (path, *path.absolute().parents) if above.exists())


def _try(path: Path, folder: Path) -> None:
    """Raise OSError if a file cannot be written. An existing file does not change; a new one is not created."""
    if path.is_char_device():
        with path.open("wb", buffering=0) as device:
            device.write(b"" if device.isatty() else b"\n")
    elif not path.exists():
        _try_in(folder)


def _try_in(folder: Path) -> None:
    """Raise OSError if no file can be written in a directory, for example on a full disk."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(_PROBE)
        probe.flush()
        os.fsync(probe.fileno())  # some file systems allocate space only now
