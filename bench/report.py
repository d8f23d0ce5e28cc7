"""The report of a suite in one JSON format for all suites, and two reports side by side.

    suite, command, date, commit, machine, versions   what was measured, where, and with which code
    settings   the options of the suite
    figures    what `specq bench --compare` compares: by name, the unit, the median and all repetitions
    results    all other results, in the suite's own form

Rule: a report is rewritten after each part, so that an interrupted run leaves its results. If writing fails, the run
continues, because it also prints its tables. The next part tries to write again.

Side by side: the ratio B over A of each figure that both have. Rule: a ratio is of medians over repetitions, and each
side's spread is beside it. A ratio within the spread is not significant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        about = describe(commit)
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


Row = tuple[object, ...]
HEADER: Row = ("FIGURE", "UNIT", "A", "SPREAD", "B", "SPREAD", "B/A")
_SAME = ("settings", "machine", "versions", "commit")  # parts whose difference a reader should know


def compare_reports(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[Row], list[str]]:
    """Return rows, a header first, and notes; raises ConfigError for reports of different suites."""
    if a["suite"] != b["suite"]:
        raise ConfigError(f"these are reports of different suites: {a['suite']} and {b['suite']}")
    both = [name for name in a["figures"] if name in b["figures"]]
    if not both:
        raise ConfigError("the two reports have no figure in common")
    rows = [_row(name, a["figures"][name], b["figures"][name]) for name in both]
    return [HEADER, *rows], [*_medians(a["figures"], b["figures"], both), *_differences(a, b)]


def _row(name: str, a: Figure, b: Figure) -> Row:
    ratio = _ratio(a, b)
    return (name, a["unit"], *_side(a), *_side(b), "-" if ratio is None else f"{ratio:.3f}")


def _side(one: Figure) -> Row:
    low, high = min(one["repeats"]), max(one["repeats"])
    return (f"{one['median']:.4g}", f"{low:.4g}..{high:.4g}")


def _ratio(a: Figure, b: Figure) -> float | None:
    return b["median"] / a["median"] if a["median"] else None


def _medians(a: dict[str, Figure], b: dict[str, Figure], names: list[str]) -> Iterator[str]:
    """Yield the median ratio of the figures of each unit."""
    for unit in dict.fromkeys(a[name]["unit"] for name in names):
        found = [_ratio(a[name], b[name]) for name in names if a[name]["unit"] == unit]
        known = [ratio for ratio in found if ratio is not None]
        if known:
            yield f"median ratio of {len(known)} figures in {unit}: {median(known):.3f}"


def _differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """Yield what else differs between the two runs."""
    for part in _SAME:
        if a.get(part) != b.get(part):
            yield f"{part}: {_short(part, a, b)}"
    for name, one, other in (("A", a, b), ("B", b, a)):
        alone = [figure for figure in one["figures"] if figure not in other["figures"]]
        if alone:
            yield f"only in {name}: {', '.join(alone)}"


def _short(part: str, a: dict[str, Any], b: dict[str, Any]) -> str:
    one, other = a.get(part), b.get(part)
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return f"{one} and {other}"
    names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in names)
