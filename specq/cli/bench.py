"""`specq bench`: runs the suites of `bench/` (in the repository, not in the package) and compares two reports."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import click

from specq.cli.groups import LazyGroup
from specq.protocol import ConfigError

ROOT = Path(__file__).parents[2]  # of a checkout
_OWN_OPTIONS = ("--compare", "-h", "--help")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def __getattr__(name: str) -> click.Command:
    """Resolve `bench`, an entry of the command table, when it is called."""
    if name != "bench":
        raise AttributeError(name)
    return load()


@cache
def load(root: Path = ROOT) -> click.Command:
    """Return the command. Raises ConfigError if specq is not installed from a checkout."""
    if not (root / "bench" / "suites").is_dir():
        raise ConfigError(
            "specq bench needs a checkout of the repository (pip install -e .). With an installed package, use `specq "
            "doctor` to measure this machine and a model pair"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from bench.suites import SUITES, SUMMARIES

    decorate = click.group("bench", cls=_Suites, table=SUITES, summaries=SUMMARIES, invoke_without_command=True)
    group: click.Command = decorate(_bench)
    return group


class _Suites(LazyGroup):
    """The suites. Options without a suite name go to the default suite."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from bench.suites import DEFAULT

        names_suite = bool(args) and not args[0].startswith("-")
        if not names_suite and args[:1] not in [[option] for option in _OWN_OPTIONS]:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.option(
    "--compare", nargs=2, type=_FILE, metavar="A.json B.json", help="Print the ratios of two reports, B over A."
)
@click.pass_context
def _bench(ctx: click.Context, compare: tuple[Path, Path] | None) -> None:
    """Run a benchmark suite. It prints a short table and writes all figures to the file of `--out`."""
    if compare is None:
        return
    if ctx.invoked_subcommand is not None:
        raise click.UsageError("--compare reads two reports and runs no suite; remove the suite name")
    from bench.report import compare_reports, read_report, show

    show(*compare_reports(*map(read_report, compare)))
