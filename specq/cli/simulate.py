"""`specq simulate`: runs the real broker, verifiers and drafters under a virtual clock."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson

from specq.runtime import OutFolder, columns, how_to_install, log, writing
from specq.runtime.machine import describe
from specq.simulate.fleet_figures import fleet_rows, simulate_fleet
from specq.simulate.report import Outcome, run_points, table, to_json
from specq.simulate.scenarios import Point, apply_settings, points, read_measured, read_tables, to_toml

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("config", type=_FILE, required=False)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the scenario, e.g. network.rtt_ms=[1,20]; overrides files. Repeatable.",
)
@click.option("--calibrate", type=_FILE, help="JSON file of measurements (specq bench calibrate); overrides CONFIG.")
@click.option("--out", type=OutFolder(), help="Directory for the JSON report, PNG plots and the scenario.")
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of processes to run the simulations in.",
)
def simulate(
    config: Path | None, settings: tuple[str, ...], calibrate: Path | None, out: Path | None, processes: int
) -> None:
    """Simulate the scenarios of a TOML file: throughput, latency and acceptance on hardware that you do not have."""
    log.configure("error")
    tables = read_tables(config) if config else {}
    if calibrate:
        tables = read_measured(calibrate).applied_to(tables)
    tables = apply_settings(tables, settings)
    found = points(tables)
    if any(point.scenario.fleet.brokers for point in found):
        _simulate_fleets(tables, found, out)
        return
    outcomes = run_points(found, lambda text: click.echo(text, err=True), processes)
    click.echo(columns(table(outcomes)))
    if out is not None:
        with writing(out):
            _write(tables, to_json(outcomes), out)
            _draw(outcomes, out)


def _simulate_fleets(tables: dict[str, Any], found: list[Point], out: Path | None) -> None:
    """Simulate scenarios with several brokers, one after the other. There are no plots."""
    results = list[dict[str, Any]]()
    for point in found:
        figures = simulate_fleet(point.scenario)
        results.append({"labels": point.labels, "figures": figures.to_dict(), "scenario": asdict(point.scenario)})
        click.echo(", ".join(f"{name} {value}" for name, value in point.labels.items()) or "fleet")
        click.echo(columns(fleet_rows(figures)))
    if out is not None:
        with writing(out):
            _write(tables, {"points": results}, out)


def _write(tables: dict[str, Any], results: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "scenario.toml").write_text(to_toml(tables), "utf-8")
    about = describe()
    found = orjson.dumps(about | results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    (out / "simulate.json").write_bytes(found)


def _draw(outcomes: list[Outcome], out: Path) -> None:
    """Draw the plots, or print why not. The figures are in the JSON in any case."""
    from specq.simulate.report import draw

    try:
        draw(outcomes, out)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        click.echo(f"no plots: {how_to_install('matplotlib')}", err=True)
