"""`specq keys`: make CURVE keys; `specq keys api`: API keys of the gateway."""

from __future__ import annotations

from pathlib import Path

import click

from specq.transport import ROLES, make_keys


class _Keys(click.Group):
    """A group whose first argument may also be a directory: then it makes CURVE keys."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = args and args[0] in self.commands
        return super().resolve_command(ctx, args if known else ["curve", *args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_help = bool(args) and args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if has_help or not args else ["--", *args])


@click.group(cls=_Keys)
def keys() -> None:
    """Make keys: `specq keys DIRECTORY NAME --role ROLE` for CURVE (encryption, and who may do what), `specq keys api
    NAME` for the HTTP gateway."""


@keys.command("api")
@click.argument("name")
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("api-keys.toml"),
    show_default=True,
    help="Gets the key's hash.",
)
@click.option("--max-priority", type=int, default=0, show_default=True, help="The highest priority of its jobs.")
def api(name: str, path: Path, *, max_priority: int) -> None:
    """Make an API key for `specq serve --api-keys FILE`: the file gets its name and hash, the key itself is shown
    once."""
    from specq.gateway import make_key

    key = make_key(path, name, max_priority=max_priority)
    click.echo(f"{path} has a key of {name} now", err=True)
    click.echo(key)


@keys.command("curve")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, required=True, help="What the key may do.")
@click.option("--trusted", is_flag=True, help="Of a drafter: believe what it says its tokens were drawn from.")
@click.option(
    "--max-priority", type=int, default=0, show_default=True, help="Of a client: the highest priority of its jobs."
)
@click.option("--tenants", is_flag=True, help="Of a client: it may submit jobs for tenants, as a gateway does.")
def curve(
    directory: Path, name: str, roles: tuple[str, ...], *, trusted: bool, max_priority: int, tenants: bool
) -> None:
    """Make a CURVE key pair: DIRECTORY/NAME.secret, for its owner alone, and DIRECTORY/NAME.pub.

    The broker's directory is the list of who may connect: every .pub file in it, with its roles. All others need their
    own secret and the broker's .pub file. Give the directory as --keys; see docs/security.md.
    """
    secret, public = make_keys(directory, name, roles, trusted=trusted, max_priority=max_priority, tenants=tenants)
    click.echo(f"{secret}  keep it secret\n{public}  for the broker" + (" and all who connect" * ("broker" in roles)))
