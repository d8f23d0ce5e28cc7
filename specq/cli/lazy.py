"""Groups of commands by table: a command is imported only when it is called, so that `--help` answers in a blink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands from a table of names to "package.module:command", and a summary of each for `--help`."""

    def __init__(self, *, table: Mapping[str, str], summaries: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._table, self._summaries = dict(table), dict(summaries)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        from specq.runtime import resolve

        command: click.Command = resolve("command", self._table, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries.items()))
