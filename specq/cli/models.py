"""`specq models`: what ships with the package."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from specq.models import bundled
from specq.runtime import columns


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(*, as_json: bool) -> None:
    """List the models that ship with specq: name, role, size, licence, path."""
    found = bundled()
    if as_json:
        click.echo(json.dumps([asdict(model) | {"path": str(model.path)} for model in found], indent=2))
        return
    rows = [(m.name, m.role, f"{m.num_bytes / 1e6:.1f} MB", m.licence, m.path) for m in found]
    click.echo(columns([("NAME", "ROLE", "SIZE", "LICENCE", "PATH"), *rows]))
