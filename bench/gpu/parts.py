"""The parts by name, what each is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bench.report import Figure, Report, attempt, show
from specq.protocol import ConfigError
from specq.runtime import resolve

if TYPE_CHECKING:
    from bench.gpu.models import Pair

PARTS = {
    name: f"bench.gpu.{name}:measure"
    for name in (
        "steps",
        "overlap",
        "colocated",
        "chains",
        "heads",
        "rounds",
        "profile",
        "text",
    )
}
WITH_TRITON = ("profile",)  # parts that cannot be imported without it


@dataclass(frozen=True)
class Task:
    """The pair; numbers of sessions; for `text` the prompts of each data set and the tokens of each text."""

    pair: Pair
    sessions: tuple[int, ...]
    num_prompts: int
    output_len: int


@dataclass(frozen=True)
class Found:
    """What a part has measured: figures by name, and whatever else it found."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    results: Any = None


def measure_part(name: str, task: Task) -> Found:
    """Measure one part; raises ConfigError if it needs what is not here."""
    if name in WITH_TRITON and find_spec("triton") is None:
        raise ConfigError(f"{name} measures kernels, which need an NVIDIA GPU and Triton")
    found: Found = resolve("part", PARTS, name)(task)
    return found


def measure_parts(report: Report, names: Sequence[str], task: Task) -> None:
    """Measure parts, each imported when it is its turn; one that fails is reported, and the others go on."""
    rows: list[tuple[object, ...]] = [("FIGURE", "MEDIAN", "UNIT")]
    for name in names:
        found = attempt(name, partial(measure_part, name, task))
        if not isinstance(found, Found):
            found = Found(results=found)
        figures = {f"{name} {what}": one for what, one in found.figures.items()}
        report.update(figures=figures, results={} if found.results is None else {name: found.results})
        rows += [(what, one["median"], one["unit"]) for what, one in figures.items()]
    show(rows)
