"""PNG plots of a sweep: throughput, latency and acceptance against each swept number. The only file with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specq.simulate.report import Outcome
from specq.simulate.sweep import Label

# title, label of the axis, the lines of a series: (path into the figures, style)
PANELS = (
    ("Throughput", "tokens/s", (("goodput", "-"),)),
    (
        "Time to first token (dashed: p95)",
        "ms",
        (("time_to_first_token_ms.p50", "-"), ("time_to_first_token_ms.p95", "--")),
    ),
    ("Time between tokens (dashed: p95)", "ms", (("token_ms.p50", "-"), ("token_ms.p95", "--"))),
    ("Tokens a round", "tokens", (("mean_accepted_length", "-"),)),
    ("Acceptance of verified nodes", "share", (("acceptance_rate", "-"),)),
    ("Rounds that begin with live nodes", "share", (("hit_rate", "-"),)),
)
_NAMES = {
    "network.rtt_ms": "round trip between drafters and broker, ms",
    "traffic.sessions": "sessions in flight",
    "traffic.jobs_per_s": "load, jobs/s",
    "draft.drafters": "drafters",
}


def draw(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write one PNG for each swept number; return the files. Raises ModuleNotFoundError without matplotlib."""
    axes = numeric_axes(outcomes)
    return [_draw(outcomes, axis, folder / f"against_{axis.partition('.')[2]}.png") for axis in axes]


def numeric_axes(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the swept keys with several values, all of them numbers."""
    values = {name: {outcome.labels[name] for outcome in outcomes} for name in outcomes[0].labels}
    return [name for name, seen in values.items() if len(seen) > 1 and all(type(v) in (int, float) for v in seen)]


def series(outcomes: Sequence[Outcome], axis: str) -> dict[str, list[Outcome]]:
    """Return name -> outcomes along the axis, for each combination of the other labels."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        others = [_told(name, value) for name, value in outcome.labels.items() if name != axis]
        found.setdefault(", ".join(others), []).append(outcome)
    return {name: sorted(own, key=lambda outcome: float(outcome.labels[axis])) for name, own in found.items()}


def _told(name: str, value: Label) -> str:
    return value if isinstance(value, str) else f"{name.partition('.')[2]} {value}"


def _draw(outcomes: Sequence[Outcome], axis: str, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(15, 8), layout="constrained")
    lines = series(outcomes, axis)
    for panel, (title, unit, paths) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for i, (name, own) in enumerate(lines.items()):
            for figure_path, style in paths:
                xs = [outcome.labels[axis] for outcome in own]
                ys = [_value(outcome, figure_path) for outcome in own]
                panel.plot(xs, ys, style, color=f"C{i}", marker="o", markersize=3, label=name if style == "-" else None)
        panel.set(title=title, xlabel=_NAMES.get(axis, axis), ylabel=unit)
        panel.set_ylim(0, 1.08 * panel.dataLim.y1 or 1)
        panel.grid(alpha=0.3)
    if len(lines) > 1:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)
    return path


def _value(outcome: Outcome, path: str) -> float:
    value: Any = outcome.figures
    for name in path.split("."):
        value = getattr(value, name)
    return float(value)
