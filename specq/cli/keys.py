"""`specq keys`: creates CURVE keys; `specq keys api`: creates API keys for the gateway."""

from __future__ import annotations

from pathlib import Path

import click

from specq.transport import ROLES, make_keys


class _Keys(click.Group):
    """A group that creates CURVE keys if the first argument is not a subcommand."""

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
    """Create keys.

    `specq keys DIRECTORY NAME --role ROLE` creates a CURVE key for encryption and roles. `specq keys api NAME` creates
    an API key for the HTTP gateway.
    """


@keys.command("api")
@click.argument("name")
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("api-keys.toml"),
    show_default=True,
    help="File that stores the hash of the key.",
)
@click.option(
    "--max-priority", type=int, default=0, show_default=True, help="Highest job priority that the key allows."
)
def api(name: str, path: Path, *, max_priority: int) -> None:
    """Create an API key for `specq serve --api-keys FILE`.

    The file stores its name and hash. This command prints the key once.
    """
    from specq.gateway import make_key

    key = make_key(path, name, max_priority=max_priority)
    click.echo(f"added a key of {name} to {path}", err=True)
    click.echo(key)


@keys.command("curve")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("name")
@click.option(
    "--role", "roles", type=click.Choice(ROLES), multiple=True, required=True, help="Role of the key. Repeatable."
)
@click.option("--trusted", is_flag=True, help="For a drafter: use the draft distributions that it sends.")
@click.option(
    "--max-priority",
    type=int,
    default=0,
    show_default=True,
    help="For a client: highest job priority that the key allows.",
)
@click.option("--tenants", is_flag=True, help="For a client: allow jobs for tenants, as a gateway submits them.")
def curve(
    directory: Path, name: str, roles: tuple[str, ...], *, trusted: bool, max_priority: int, tenants: bool
) -> None:
    """Create a CURVE key pair: the private DIRECTORY/NAME.secret and the public DIRECTORY/NAME.pub.

    The broker accepts all keys with a .pub file in its directory, with their roles. Each other process needs its own
    .secret file and the broker's .pub file. Pass the directory as --keys; see docs/security.md.
    """
    secret, public = make_keys(directory, name, roles, trusted=trusted, max_priority=max_priority, tenants=tenants)
    click.echo(
        f"{secret}  keep it secret\n{public}  copy it to the broker" + (" and its clients" * ("broker" in roles))
    )
