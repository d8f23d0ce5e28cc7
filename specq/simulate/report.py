"""A sweep's results: each scenario with its figures, as a table for the screen, as JSON, and as PNG plots.

The plots show throughput, latency and acceptance against each swept number. This is the only file with matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specq.runtime import log
from specq.simulate.figures import Figures
from specq.simulate.run import SimulatedSpeed, simulate_timed
from specq.simulate.scenarios import Label, Point
from specq.simulate.settings import Scenario

Row = tuple[object, ...]
HEADER = (
    "TOKENS/S",
    "VS PLAIN",
    "TOKENS/ROUND",
    "ACCEPTED",
    "HITS",
    "ROWS/STEP",
    "WASTED",
    "STALE",
    "FIRST MS",
    "P95",
    "TOKEN MS",
    "P95",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario and its results."""

    labels: dict[str, Label]
    scenario: Scenario
    figures: Figures
    speed: SimulatedSpeed

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding, without drafters and without lookups by the verifier."""
        return self.scenario.speculation.mode == "plain" or not (
            self.scenario.draft.drafters or self.figures.draft_tokens
        )

    def to_dict(self) -> dict[str, Any]:
        speed = {
            "cpu_s": round(self.speed.cpu_s, 3),
            "num_events": self.speed.num_events,
            "events_per_s": round(self.speed.events_per_s),
        }
        return {
            "labels": self.labels,
            "figures": self.figures.to_dict(),
            "scenario": asdict(self.scenario),
            "simulator": speed,
        }


def run_points(points: Sequence[Point], tell: Callable[[str], None], processes: int = 1) -> list[Outcome]:
    """Simulate all points, in their order; `processes` of this machine share the work."""
    outcomes = []
    for outcome in _outcomes(points, processes):
        outcomes.append(outcome)
        tell(_progress(outcome, len(outcomes), len(points)))
    return outcomes


def _outcomes(points: Sequence[Point], processes: int) -> Iterator[Outcome]:
    if processes == 1 or len(points) == 1:
        yield from map(_outcome, points)
        return
    with ProcessPoolExecutor(processes, initializer=log.configure, initargs=("error",)) as pool:
        yield from pool.map(_outcome, points)


def _outcome(point: Point) -> Outcome:
    figures, speed = simulate_timed(point.scenario)
    return Outcome(point.labels, point.scenario, figures, speed)


def _progress(outcome: Outcome, number: int, total: int) -> str:
    labels = ", ".join(f"{name} {value}" for name, value in outcome.labels.items())
    speed = f"{outcome.figures.seconds:g} s in {outcome.speed.cpu_s:.1f} s, {outcome.speed.events_per_s:.0f} events/s"
    return f"{number}/{total} {labels or 'scenario'}: {outcome.figures.goodput:.1f} tokens/s ({speed})"


def vs_plain(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """Return the ratio to plain decoding on the same hardware with the same traffic, if that was simulated."""
    for other in outcomes:
        if other.is_plain and _place(other.scenario) == _place(outcome.scenario) and other.figures.goodput:
            return round(outcome.figures.goodput / other.figures.goodput, 4)
    return None


def _place(scenario: Scenario) -> tuple[object, ...]:
    """Return the settings that plain decoding depends on."""
    return scenario.engine, scenario.host, scenario.traffic, scenario.network.near_rtt_ms


def table(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the results as rows for the screen, a header first."""
    names = list(outcomes[0].labels)
    header = (*(name.partition(".")[2].upper() or name.upper() for name in names), *HEADER)
    return [header, *((*outcome.labels.values(), *_cells(outcome, outcomes)) for outcome in outcomes)]


def _cells(outcome: Outcome, outcomes: Sequence[Outcome]) -> Row:
    own, ratio = outcome.figures, vs_plain(outcome, outcomes)
    return (
        f"{own.goodput:.1f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        f"{own.mean_accepted_length:.2f}",
        f"{own.acceptance_rate:.0%}",
        f"{own.hit_rate:.0%}",
        f"{own.rows_per_step:.1f}",
        own.wasted_rows,
        own.stale,
        f"{own.time_to_first_token_ms.p50:.0f}",
        f"{own.time_to_first_token_ms.p95:.0f}",
        f"{own.token_ms.p50:.1f}",
        f"{own.token_ms.p95:.1f}",
    )


def to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return everything as JSON-able values."""
    return {"points": [outcome.to_dict() | {"vs_plain": vs_plain(outcome, outcomes)} for outcome in outcomes]}


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
