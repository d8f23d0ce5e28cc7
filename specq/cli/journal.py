"""`specq journal migrate`, `specq journal copy` and `specq journal check`: what an operator does with journals."""

from __future__ import annotations

import click

from specq.journal import Opening, check_journal, copy_journal, open_journal


@click.group()
def journal() -> None:
    """Prepare, copy or check a broker's journal: a SQLite file, or postgresql://USER@HOST/DATABASE."""


@journal.command()
@click.argument("address")
def migrate(address: str) -> None:
    """Create the journal at ADDRESS, or upgrade it to this version of specq.

    A broker does the same when it starts. Brokers of the version before may go on with a PostgreSQL journal.

    \b
    Example:
      specq journal migrate postgresql://specq@db.example.org/specq
    """
    opened = open_journal(address, Opening(owner="specq journal migrate"))
    opened.close()
    click.echo(f"{opened.address} is up to date")


@journal.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
def copy(source: str, target: str) -> None:
    """Copy all jobs of the journal FROM to the empty journal TO, which may be of another kind.

    Results keep their ages, and unfinished jobs their tokens. Stop all brokers of both journals first.

    \b
    Example:
      specq journal copy broker.journal postgresql://specq@db.example.org/specq
    """
    copied = copy_journal(source, target)
    click.echo(f"copied {copied.num_unfinished} unfinished jobs and {copied.num_results} results")
    if copied.num_misfits:
        click.echo(
            f"{copied.num_misfits} results have values that are out of bounds now; these were left out", err=True
        )


@journal.command()
@click.argument("address")
@click.pass_context
def check(ctx: click.Context, /, address: str) -> None:
    """Read all of the journal at ADDRESS, and report what it has. Exits with 1 if something is wrong.

    Brokers may use the journal meanwhile.

    \b
    Example:
      specq journal check postgresql://specq@db.example.org/specq
    """
    report = check_journal(address)
    click.echo(f"{report.num_unfinished} unfinished jobs, {report.num_results} results, {report.num_tokens} tokens")
    if report.num_misfits:
        click.echo(f"{report.num_misfits} jobs have values that are out of bounds now")
    for fault in report.faults:
        click.echo(f"fault: {fault}", err=True)
    if report.num_faults > len(report.faults):
        click.echo(f"and {report.num_faults - len(report.faults)} more faults", err=True)
    ctx.exit(1 if report.num_faults else 0)
