"""From units to figures: rates, ratios paired unit by unit, and beside them the required values.

Rule: a ratio is the median over units of two turns seconds apart, with its bootstrap interval. Units where a contestant
gave fewer than LEAST_TOKENS tokens are left out, because their seconds are mostly noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.deployments import PLAIN
from bench.figures import interval_text, paired
from bench.report import Figure, figure
from bench.rivals.field import LLAMA_FASTEST, all_names, llama_on_all_cores
from bench.rivals.grid import Unit

LEAST_TOKENS = 8
DRAFTING = "colocated"
BEST = "best of plain and lookup"
Row = tuple[object, ...]
HEADER: Row = (
    *("CELL", "CONTESTANT", "UNITS", "TOKENS/S", "VS LLAMA.CPP", f"VS {LLAMA_FASTEST.upper()}", "VS TRANSFORMERS"),
    *("VS PLAIN", "TOKENS/ROUND"),
)
ASKED_HEADER: Row = ("ASKED", "CELL", "RATIO", "INTERVAL", "AT LEAST", "AIM", "")


@dataclass(frozen=True, slots=True)
class Asked:
    """A required ratio between two contestants in a cell."""

    ours: str
    other: str
    cell: str
    least: float
    aim: float | None = None

    @property
    def text(self) -> str:
        return f"{self.ours} / {self.other}"


def asked() -> list[Asked]:
    """Return the project's required ratios on two cores."""
    llama = llama_on_all_cores()
    return [
        Asked(DRAFTING, llama, "greedy/1", 1.9, 2.5),
        Asked(DRAFTING, "transformers", "greedy/1", 8.0),
        Asked(PLAIN, llama, "greedy/1", 0.85, 1.2),
        Asked(DRAFTING, llama, "T=0.8/1", 1.5),
        Asked(DRAFTING, BEST, "greedy/4", 0.98, 1.1),
        Asked(DRAFTING, BEST, "greedy/16", 0.98),
    ]


def by_cell(units: Mapping[str, Unit]) -> dict[str, list[Unit]]:
    """Return the units of each cell."""
    found: dict[str, list[Unit]] = {}
    for name, unit in units.items():
        found.setdefault(name.rpartition("/")[0], []).append(unit)
    return found


def rates_of(units: Sequence[Unit], name: str) -> list[float]:
    """Return a contestant's rate in each unit that counts."""
    return [unit["turns"][name]["rate"] for unit in units if _counts(unit, name)]


def ratio(units: Sequence[Unit], ours: str, other: str) -> dict[str, Any] | None:
    """Return the paired ratio in the units where both were measured, as `paired`; None without such units."""
    if other == BEST:
        other = max(("plain", "lookup"), key=lambda name: median(rates_of(units, name) or [0.0]))
    both = [unit["turns"] for unit in units if _counts(unit, ours) and _counts(unit, other)]
    if not both or ours == other:
        return None
    return paired([turns[ours]["rate"] for turns in both], [turns[other]["rate"] for turns in both])


def _counts(unit: Unit, name: str) -> bool:
    turn = unit["turns"].get(name)
    return turn is not None and turn["tokens"] >= LEAST_TOKENS


def figures(units: Mapping[str, Unit]) -> dict[str, Figure]:
    """Return the rates by cell and contestant, and their ratios to llama.cpp, transformers and plain decoding."""
    found = {}
    for cell, own in by_cell(units).items():
        for name in _names(own):
            found[f"{cell} {name} tokens/s"] = figure("tokens/s", rates_of(own, name))
            for other in (llama_on_all_cores(), LLAMA_FASTEST, "transformers", PLAIN):
                if one := ratio(own, name, other):
                    found[f"{cell} {name} / {other}"] = figure("ratio", one["ratios"])
    return found


def _names(units: Sequence[Unit]) -> list[str]:
    return [name for name in all_names() if rates_of(units, name)]


# --- tables -------------------------------------------------------------------------------------------------------


def table(units: Mapping[str, Unit]) -> list[Row]:
    """Return a row for each cell and contestant, a header first."""
    return [HEADER, *(_row(cell, own, name) for cell, own in by_cell(units).items() for name in _names(own))]


def _row(cell: str, units: Sequence[Unit], name: str) -> Row:
    rates = rates_of(units, name)
    ratios = (
        interval_text(ratio(units, name, other))
        for other in (llama_on_all_cores(), LLAMA_FASTEST, "transformers", PLAIN)
    )
    return (cell, name, len(rates), f"{median(rates):.1f}", *ratios, _tokens_a_round(units, name))


def _tokens_a_round(units: Sequence[Unit], name: str) -> str:
    turns = [unit["turns"][name] for unit in units if _counts(unit, name)]
    rounds = sum(turn["rounds"] for turn in turns)
    tokens = sum(turn["tokens"] for turn in turns)
    return f"{tokens / rounds:.2f}" if rounds else "-"


def asked_table(units: Mapping[str, Unit]) -> list[Row]:
    """Return the required values beside the results, a header first."""
    cells = by_cell(units)
    return [ASKED_HEADER, *(_asked_row(one, ratio(cells.get(one.cell, []), one.ours, one.other)) for one in asked())]


def _asked_row(one: Asked, found: dict[str, Any] | None) -> Row:
    aim = "-" if one.aim is None else f"{one.aim:g}"
    if found is None:
        return (one.text, one.cell, "-", "-", f"{one.least:g}", aim, "not measured")
    low, high = found["interval"]
    verdict = "ok" if found["median"] >= one.least else "MISSED"
    return (one.text, one.cell, f"{found['median']:.3f}", f"{low:.3f} to {high:.3f}", f"{one.least:g}", aim, verdict)


def dataset_table(units: Mapping[str, Unit]) -> list[Row]:
    """Return the ratio of specq's drafter to llama.cpp and to plain decoding by data set, for cells of one session."""
    rows: list[Row] = [("CELL", "DATA SET", "COLOCATED / LLAMA.CPP", "COLOCATED / PLAIN", "TOKENS/ROUND")]
    for cell, own in by_cell(units).items():
        for dataset in _datasets(own) if cell.endswith("/1") else ():
            some = [unit for unit in own if _dataset(unit) == dataset]
            ratios = (interval_text(ratio(some, DRAFTING, other)) for other in (llama_on_all_cores(), PLAIN))
            rows.append((cell, dataset, *ratios, _tokens_a_round(some, DRAFTING)))
    return rows


def _datasets(units: Sequence[Unit]) -> list[str]:
    return list(dict.fromkeys(_dataset(unit) for unit in units))


def _dataset(unit: Unit) -> str:
    name: str = unit["prompts"][0]
    return name.partition("/")[0]


def prefill_rates(prompts: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return each contestant's tokens a second, one for each prompt that all contestants computed."""
    names = [name for name in all_names() if prompts and all(name in one for one in prompts)]
    return {name: [one[name] for one in prompts] for name in names}


def prefill_table(rates: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return tokens a second of a long prompt, and the paired ratio to llama.cpp on all cores."""
    to = rates.get(llama_on_all_cores())
    ratios: Callable[[Sequence[float]], str] = lambda own: interval_text(paired(own, to)) if to else "-"  # noqa: E731
    rows = [(name, f"{median(own):.0f}", ratios(own)) for name, own in rates.items()]
    return [("PROMPT", "TOKENS/S", "VS LLAMA.CPP"), *rows]


def memory_table(memory: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Row]:
    """Return the memory of each process."""
    rows = [
        (group, name, f"{one['peak_mb']:.0f}", f"{one['now_mb']:.0f}")
        for group, processes in memory.items()
        for name, one in processes.items()
    ]
    return [("PROCESSES OF", "PROCESS", "PEAK MB", "STEADY MB"), *rows]
