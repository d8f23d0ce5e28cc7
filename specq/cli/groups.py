"""Groups of commands and of options.

LazyGroup        Commands by table, each imported only when it is called. The group's `--help` imports none.
GroupedCommand   `--help` shows each group of options under its heading, in order of declaration.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import click

REST = "Options"  # heading of the options without a group, which come last


class LazyGroup(click.Group):
    """Commands by table: name -> "package.module:object", and name -> its line in `--help`."""

    def __init__(self, *args: Any, table: dict[str, str], summaries: dict[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table, self.summaries = table, summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        from specq.runtime import resolve

        command: click.Command = resolve("command", self.table, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the called command; the error for an unknown name suggests a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not (alike := get_close_matches(args[0], self.table, 1)):
                raise
            raise click.UsageError(f"{error.message} Did you mean {alike[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))


class GroupedOption(click.Option):
    """An option with its heading: `click.option(..., cls=GroupedOption, group="Sampling")`."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command with grouped help."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "group", REST), []).append(record)
        for heading in sorted(sections, key=lambda heading: heading == REST):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])
