"""`specq ray up`, `specq ray status` and `specq ray down`: a deployment on a Ray cluster."""

from __future__ import annotations

import click

from specq.config import load


@click.group()
def ray() -> None:
    """Run specq on a Ray cluster: Ray places, restarts and scales the processes (docs/guides/ray.md)."""


@ray.command()
@click.argument("config_file", metavar="CONFIG", type=click.Path(dir_okay=False))
def up(config_file: str) -> None:
    """Start the deployment of a TOML file, or change the running one to it, one process at a time.

    The cluster is the one of RAY_ADDRESS, or of this machine.

    \b
    Example:
      specq ray up specq.toml
    """
    config = load(config_file)
    from specq.ray import deployment

    with deployment.connected():
        deployment.up(config, click.echo)
        click.echo(deployment.table(deployment.status()))


@ray.command()
def status() -> None:
    """Show the processes, where they run, and what has no place."""
    from specq.ray import deployment

    with deployment.connected():
        click.echo(deployment.table(deployment.status()))


@ray.command()
def down() -> None:
    """Stop all processes. Unfinished jobs stay in the journal."""
    from specq.ray import deployment

    with deployment.connected():
        deployment.down()
        click.echo("stopped")
