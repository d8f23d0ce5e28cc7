"""`specq bench`: everything that measures, a suite each (`specq.bench.suites`), and two reports side by side."""

from __future__ import annotations

from pathlib import Path

import click

from specq.bench.ratios import compare_reports
from specq.bench.report import read_report, show
from specq.bench.suites import DEFAULT, SUITES, SUMMARIES
from specq.cli.groups import LazyGroup

_OWN_OPTIONS = ("--compare", "-h", "--help")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Suites(LazyGroup):
    """The suites; options without the name of a suite go to the default one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names_suite = bool(args) and not args[0].startswith("-")
        if not names_suite and args[:1] not in [[option] for option in _OWN_OPTIONS]:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Suites, table=SUITES, summaries=SUMMARIES, invoke_without_command=True)
@click.option(
    "--compare", nargs=2, type=_FILE, metavar="A.json B.json", help="Print the ratios of two reports, B over A."
)
@click.pass_context
def bench(ctx: click.Context, compare: tuple[Path, Path] | None) -> None:
    """Measure: each suite prints a short table and writes all its figures to the file that `--out` names."""
    if compare is None:
        return
    if ctx.invoked_subcommand is not None:
        raise click.UsageError("--compare reads two reports and measures nothing; give no suite")
    show(*compare_reports(*map(read_report, compare)))
