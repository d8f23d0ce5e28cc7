"""`specq bench journal`: what the journal costs on this machine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from bench.journal_cost import measure_groups, round_trips
from bench.report import Figure, Report, figure, show
from bench.suite import COUNT, suite
from specq.runtime import Number

UNITS = {"p50_us": "us", "p99_us": "us", "groups_per_s": "groups/s"}


@suite("journal")
@click.option("--groups", type=COUNT, default=1000, show_default=True, help="Groups of each kind.")
@click.option(
    "--roundtrip", "repeats", type=click.IntRange(0), default=0, show_default=True,
    help="Repetitions of the round trips; 0: none.",
)  # fmt: skip
@click.option("--seconds", type=Number(0.01), default=2.0, show_default=True, help="Of each repetition.")
@click.option("--directory", type=click.Path(file_okay=False, exists=True), help="Where the journals are made.")
def command(report: Report, *, groups: int, repeats: int, seconds: float, directory: str | None) -> None:
    """Measure the time of a group of rows by durability and size, and the broker's throughput with each kind of journal."""
    report.update(settings={"groups": groups, "repeats": repeats, "seconds": seconds, "directory": directory})
    with TemporaryDirectory(dir=directory) as folder:
        found = list(measure_groups(Path(folder), groups))
        report.update(figures=_group_figures(found), results={"groups": found})
        trips = round_trips(Path(folder), repeats, seconds) if repeats else {}
    rates = {f"round trips, journal {name}": figure("round trips/s", one["rates"]) for name, one in trips.items()}
    report.update(figures=rates, results={"roundtrip": trips})
    notes = [
        f"journal {name}: {one['rate']:.0f} round trips/s, {one['ratio']:.2f} of those without"
        for name, one in trips.items()
    ]
    show([tuple(name.upper() for name in found[0]), *(tuple(row.values()) for row in found)], notes)


def _group_figures(found: list[dict[str, Any]]) -> dict[str, Figure]:
    return {
        f"{one['durability']}, {one['rows']} rows, {name}": figure(unit, [one[name]])
        for one in found
        for name, unit in UNITS.items()
    }
