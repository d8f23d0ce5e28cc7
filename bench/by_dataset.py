"""Data set by data set: speed, and right answers where they were counted, as a table and as a plot of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import Row, or_dash
from bench.report import Figure, figure, tell
from specq.runtime import how_to_install

Contestants = Mapping[str, dict[str, Any]]
HEADER: Row = ("DATA SET", "CONTESTANT", "TOKENS/S", "VS PLAIN", "TOKENS/ROUND", "RIGHT")


def dataset_table(contestants: Contestants) -> list[Row]:
    """Return a row for each data set and contestant, a header first."""
    return [HEADER, *(_row(dataset, name, contestants) for dataset, name, _ in _cells(contestants))]


def _row(dataset: str, name: str, contestants: Contestants) -> Row:
    own, plain = (contestants.get(one, {}).get("by_dataset", {}).get(dataset, {}) for one in (name, "plain"))
    rates, plain_rates = _rates(own), _rates(plain)
    ratio = median(a / b for a, b in zip(rates, plain_rates, strict=True)) if rates and plain_rates else None
    return (
        *(dataset, name, or_dash(median(rates) if rates else None, "{:.1f}".format), or_dash(ratio, "{:.2f}x".format)),
        or_dash(own["mean_accepted_length"], "{:.2f}".format),
        f"{'/'.join(map(str, sorted(set(own['right']))))} of {own['asked']}" if "right" in own else "-",
    )


def dataset_figures(contestants: Contestants) -> dict[str, Figure]:
    """Return speed and the share of right answers, by data set and contestant."""
    found = {}
    for dataset, name, own in _cells(contestants):
        if rates := _rates(own):
            found[f"{dataset} {name} tokens/s"] = figure("tokens/s", rates)
        if "right" in own:
            found[f"{dataset} {name} right"] = figure("share", [count / own["asked"] for count in own["right"]])
    return found


def _rates(own: Mapping[str, Any]) -> list[float]:
    return list(own.get("tokens_per_second", {}).get("repeats", []))


def _cells(contestants: Contestants) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (data set, contestant, figures), the data sets in order."""
    for dataset in dict.fromkeys(dataset for own in contestants.values() for dataset in own["by_dataset"]):
        for name, own in contestants.items():
            yield dataset, name, own["by_dataset"][dataset]


def can_draw() -> bool:
    """Return whether matplotlib is installed; tell how to install it if it is not."""
    if find_spec("matplotlib") is None:
        tell(f"no plots: {how_to_install('matplotlib')}")
        return False
    return True


def draw(contestants: Contestants, report: Path) -> list[Path]:
    """Write a PNG for each data set beside the report; return the files."""
    from matplotlib.figure import Figure as Canvas

    datasets, figures = dict.fromkeys(dataset for dataset, *_ in _cells(contestants)), dataset_figures(contestants)
    paths = []
    for dataset in datasets:
        canvas: Any = Canvas(figsize=(10, 4), layout="constrained")
        canvas.suptitle(dataset)
        for panel, what in zip(canvas.subplots(1, 2), ("tokens/s", "right"), strict=True):
            bars = {name: found for name in contestants if (found := figures.get(f"{dataset} {name} {what}"))}
            _bars(panel, what, bars)
        paths.append(report.with_name(f"{report.stem}_{dataset}.png"))
        canvas.savefig(paths[-1], dpi=110)
    return paths


def _bars(panel: Any, title: str, bars: Mapping[str, Figure]) -> None:
    """Draw the median of each contestant, and its repetitions as points."""
    shown = panel.bar(list(bars), [one["median"] for one in bars.values()], color="C0")
    panel.bar_label(shown, fmt="%.3g")
    for name, one in bars.items():
        panel.plot([name] * len(one["repeats"]), one["repeats"], "k.", markersize=4)
    panel.set(title=title if bars else f"{title}: not measured", ylim=(0, None))
    panel.tick_params(axis="x", rotation=30)
