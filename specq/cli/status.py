"""`specq status`: what the broker sees."""

from __future__ import annotations

import json
from typing import Any

import click

from specq import Client
from specq.cli.options import section_options
from specq.config import ClientConfig, load, override
from specq.runtime import columns

_SHOWN = ("name", "role", "model", "engine", "state", "jobs", "steps", "free_slots", "heard_s_ago")


@click.command()
@section_options(ClientConfig)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
def status(config_file: str | None, *, as_json: bool, **values: Any) -> None:
    """Show what a broker sees: workers, jobs, counters."""
    config = override(load(config_file).client, **values)
    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys) as client:
        report = client.status()
    click.echo(json.dumps(report, indent=2) if as_json else _table(report))


def _table(report: dict[str, Any]) -> str:
    """Return the report as text: a line for each worker, then the numbers of jobs and the counters that are not 0."""
    header = [name.replace("_", " ").upper() for name in _SHOWN]
    workers = [[worker[name] for name in _SHOWN] for worker in report["workers"]]
    jobs = ", ".join(f"{count} {state}" for state, count in report["jobs"].items())
    counts = ", ".join(f"{name} {count}" for name, count in sorted(report["counts"].items()) if count)
    lines = [columns([header, *workers]) if workers else "no workers", "", f"jobs: {jobs}"]
    trouble = report.get("journal", {}).get("trouble", "")
    return "\n".join([*lines, *([f"counters: {counts}"] if counts else []), *([trouble] if trouble else [])])
