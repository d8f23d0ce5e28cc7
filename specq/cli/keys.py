"""`specq keys`: make CURVE keys."""

from __future__ import annotations

from pathlib import Path

import click

from specq.transport import ROLES, make_keys


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, required=True, help="What the key may do.")
@click.option("--trusted", is_flag=True, help="Of a drafter: believe what it says its tokens were drawn from.")
@click.option(
    "--max-priority", type=int, default=0, show_default=True, help="Of a client: the highest priority of its jobs."
)
def keys(directory: Path, name: str, roles: tuple[str, ...], *, trusted: bool, max_priority: int) -> None:
    """Make a CURVE key pair: DIRECTORY/NAME.secret, for its owner alone, and DIRECTORY/NAME.pub.

    The broker's directory is the list of who may connect: every .pub file in it, with its roles. All others need their own
    secret and the broker's .pub file. Give the directory as --keys; see docs/security.md.
    """
    secret, public = make_keys(directory, name, roles, trusted=trusted, max_priority=max_priority)
    click.echo(f"{secret}  keep it secret\n{public}  for the broker" + (" and all who connect" * ("broker" in roles)))
