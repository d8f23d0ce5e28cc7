"""`specq jobs`: lists the jobs of a broker."""

from __future__ import annotations

import json
from typing import Any

import click

from specq.cli.options import section_options
from specq.client import JobDesk, has_ended, id_of
from specq.config import ClientConfig, load, override
from specq.runtime import columns

_HEADER = ("JOB", "ID", "STATE", "TOKENS", "AGE", "PRIORITY", "MODEL")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@click.command()
@click.option(
    "--limit", type=click.IntRange(0), default=20, show_default=True, help="Maximum number of finished jobs to list."
)
@click.option("--all", "list_all", is_flag=True, help="List all finished jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
@section_options(ClientConfig)
def jobs(config_file: str | None, limit: int, *, list_all: bool, as_json: bool, **values: Any) -> None:
    """List the jobs of a broker: waiting and running jobs, then finished jobs, newest first."""
    config = override(load(config_file).client, **values)
    with JobDesk(config.broker, config.timeout_s, config.keys) as desk:
        lines = list(desk.list_jobs(None if list_all else limit))
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
    else:
        click.echo(columns([_HEADER, *map(_row, lines)]) if lines else "no jobs")
        if not list_all and sum(map(has_ended, lines)) == limit:
            click.echo(f"only the last {limit} finished jobs; --all lists all", err=True)


def _row(line: dict[str, Any]) -> tuple[object, ...]:
    shown = id_of(line["label"], line["job_id"])
    return (
        line["job_id"],
        str(shown)[:40],
        line["state"],
        line["tokens"],
        _age(line["age_s"]),
        line["priority"],
        line["model"],
    )


def _age(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
