"""Two reports of one suite side by side: the ratio B over A of each figure that both have.

Rule: a ratio is of medians over repetitions, and each side's spread is beside it. A ratio within the spread is not
significant.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.report import Figure
from specq.protocol import ConfigError

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
