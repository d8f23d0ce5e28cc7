"""Options in groups: `--help` shows each group under its own heading, in the order in which they are declared."""

from __future__ import annotations

from typing import Any

import click

REST = "Options"  # the heading of those without a group, which come last


class GroupedOption(click.Option):
    """An option with the heading under which it is shown: `click.option(..., cls=GroupedOption, group="Sampling")`."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help is grouped."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section a group."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "group", REST), []).append(record)
        for heading in sorted(sections, key=lambda heading: heading == REST):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])
