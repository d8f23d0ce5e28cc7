"""The report of a suite: one JSON format for all suites.

    suite, command, date, commit, machine, versions   what was measured, where, and with which code
    settings   the options of the suite
    figures    what `specq bench --compare` compares: by name, the unit, the median and all repetitions
    results    all other results, in the suite's own form

Rule: a report is rewritten after each part, so that an interrupted run leaves its results. If writing fails, the run
continues, because it also prints its tables. The next part tries to write again.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from traceback import format_exc
from typing import Any

import click
import orjson

from specq.protocol import ConfigError, SpecqError
from specq.runtime import cannot_write, columns, whole_file
from specq.runtime.machine import describe

_OPTIONS = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS

Figure = dict[str, Any]


def figure(unit: str, repeats: Iterable[float]) -> Figure:
    """Return a figure with its median and all its repetitions."""
    found = [round(float(value), 4) for value in repeats]
    return {"unit": unit, "median": round(median(found), 4), "repeats": found}


def read_report(path: Path) -> dict[str, Any]:
    """Return a report of `specq bench`; raises ConfigError for a file that is not a report."""
    try:
        report = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(report, dict) or not {"suite", "figures"} <= set(report):
        raise ConfigError(f"{path} is not a report of specq bench: it has no suite and no figures")
    return report


class Report:
    """The results of a suite so far."""

    def __init__(self, suite: str, out: Path | None = None, commit: str = "") -> None:
        """Begin a report.

        out      the file to write, if any.
        commit   the commit of the measured code, if git does not know it.
        """
        self.out, self._unwritten = out, ""  # the latter: why the file is incomplete, if it is
        about = describe(shlex.join(["specq", *sys.argv[1:]]), commit)
        self.content: dict[str, Any] = {"suite": suite, **about, "settings": {}, "figures": {}, "results": {}}

    def resume(self) -> None:
        """Load figures and results from the file, if it exists; raises ConfigError for another suite's report."""
        if self.out is None or not self.out.exists():
            return
        earlier = read_report(self.out)
        if earlier["suite"] != self.content["suite"]:
            raise ConfigError(f"{self.out} is a report of the suite {earlier['suite']}, not of {self.content['suite']}")
        for part in ("figures", "results"):
            self.content[part].update(earlier[part])

    def update(
        self,
        *,
        settings: Mapping[str, Any] | None = None,
        figures: Mapping[str, Figure] | None = None,
        results: Mapping[str, Any] | None = None,
    ) -> None:
        """Add new results, and write the file."""
        for part, values in (("settings", settings), ("figures", figures), ("results", results)):
            self.content[part].update(values or {})
        if self.out is not None:
            self._write(self.out)

    def _write(self, out: Path) -> None:
        before, self._unwritten = self._unwritten, ""
        try:
            _replace(out.resolve(), orjson.dumps(self.content, option=_OPTIONS))
        except OSError as error:
            self._unwritten = cannot_write(out, error)
            if not before:
                tell(f"{self._unwritten}; it is tried again after each part")

    def check_written(self) -> None:
        """Raise ConfigError if the file lacks results."""
        if self._unwritten:
            raise ConfigError(f"{self._unwritten}; what was measured is printed, and in no file")


def _replace(path: Path, content: bytes) -> None:
    """Replace a file; its old content stays if that fails."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def attempt(name: str, measure: Callable[[], Any]) -> Any:
    """Return the result of `measure`, or {"error": why} if it fails, so that one failure does not hide other results.

    This prints how long it took.
    """
    started = time.perf_counter()
    try:
        found = measure()
    except Exception as error:  # noqa: BLE001 - see above
        found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        tell(f"{name}: {error}" if isinstance(error, SpecqError) else f"{name}: {format_exc()}")
    tell(f"-- {name}: {time.perf_counter() - started:.0f} s")
    return found


def show(rows: Sequence[Sequence[object]], notes: Sequence[str] = ()) -> None:
    """Print a table, a header first, and the notes under it."""
    for line in (columns(rows), *notes):
        click.echo(line)


def tell(text: str) -> None:
    """Print progress, on standard error."""
    click.echo(text, err=True)
