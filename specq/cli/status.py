"""`specq status`: shows the state of the broker once, without rates. `specq top` shows it live, with rates."""

from __future__ import annotations

import json
from typing import Any

import click

from specq import Client
from specq.cli.options import section_options
from specq.config import ClientConfig, load, override
from specq.observe import Snapshot, View, plain


@click.command()
@section_options(ClientConfig)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
def status(config_file: str | None, *, as_json: bool, **values: Any) -> None:
    """Show the workers, jobs and counters of a broker once."""
    config = override(load(config_file).client, **values)
    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys) as client:
        report = client.status()
    click.echo(json.dumps(report, indent=2) if as_json else plain(Snapshot(report), View()))
