"""Speed by data set, and right answers where they were counted, as a table and a plot for each data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from bench.accuracy import Shares
from bench.contestants import PLAIN
from bench.figures import Row
from bench.report import Figure, figure, tell
from specq.runtime import how_to_install

ByDataset = dict[str, dict[str, dict[str, Figure]]]  # data set -> RATE or RIGHT, where known -> contestant -> figure
RATE, RIGHT = "tokens/s", "right"


def by_dataset(contestants: Mapping[str, dict[str, Any]], right: Shares) -> ByDataset:
    """Return the speed, as in `figures`, and the share of right answers for each data set, where known."""
    found: ByDataset = {}
    for name, figures in contestants.items():
        for dataset, own in figures["by_dataset"].items():
            known = found.setdefault(dataset, {})
            if "tokens_per_second" in own:
                known.setdefault(RATE, {})[name] = figure("tokens/s", own["tokens_per_second"]["repeats"])
            if dataset in right:
                known.setdefault(RIGHT, {})[name] = figure("share", right[dataset][name])
    return found


def dataset_figures(measured: ByDataset) -> dict[str, Figure]:
    """Return the figures under their names in a report."""
    return {
        f"{dataset} {name} {what}": one
        for dataset, known in measured.items()
        for what, own in known.items()
        for name, one in own.items()
    }


def dataset_table(measured: ByDataset, names: Iterable[str]) -> list[Row]:
    """Return a row for each data set and contestant, a header first."""
    header: Row = ("DATA SET", "CONTESTANT", "TOKENS/S", "VS PLAIN", "RIGHT")
    return [header, *((dataset, name, *_cells(known, name)) for dataset, known in measured.items() for name in names)]


def _cells(known: dict[str, dict[str, Figure]], name: str) -> Row:
    rate, plain, right = (known.get(what, {}).get(who) for what, who in ((RATE, name), (RATE, PLAIN), (RIGHT, name)))
    return (
        f"{rate['median']:.1f}" if rate else "-",
        f"{median(map(truediv, rate['repeats'], plain['repeats'])):.2f}x" if rate and plain else "-",
        f"{right['median']:.1%}" if right else "-",
    )


def can_draw() -> bool:
    """Return whether matplotlib is installed; if not, print how to install it."""
    if find_spec("matplotlib") is None:
        tell(f"no plots: {how_to_install('matplotlib')}")
        return False
    return True


def draw(measured: ByDataset, report: Path) -> list[Path]:
    """Write a PNG for each data set beside the report; return the files."""
    from matplotlib.figure import Figure as Canvas

    paths = []
    for dataset, known in measured.items():
        canvas: Any = Canvas(figsize=(5 * len(known), 4), layout="constrained")
        canvas.suptitle(dataset)
        for panel, (what, own) in zip(canvas.subplots(1, len(known), squeeze=False)[0], known.items(), strict=True):
            _bars(panel, what, own)
        paths.append(report.with_name(f"{report.stem}_{dataset}.png"))
        canvas.savefig(paths[-1], dpi=110)
    return paths


def _bars(panel: Any, what: str, bars: Mapping[str, Figure]) -> None:
    """Draw the median of each contestant, and its repetitions as points."""
    shown = panel.bar(list(bars), [one["median"] for one in bars.values()], color="C0")
    panel.bar_label(shown, fmt="%.3g", padding=3)
    for name, one in bars.items():
        panel.plot([name] * len(one["repeats"]), one["repeats"], "k.", markersize=4)
    panel.set(title=what, ylabel=next(iter(bars.values()))["unit"])
    panel.set_ylim(0, 1 if what == RIGHT else None)
    panel.tick_params(axis="x", rotation=30)
