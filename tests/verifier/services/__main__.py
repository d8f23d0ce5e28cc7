"""Judge the verifier's controller by random services; see `tests.verifier.services`."""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click
import structlog

from tests.verifier.services.draw import SETS, draw
from tests.verifier.services.figures import Fixed, Row, as_columns, fixed_of, from_columns, judge
from tests.verifier.services.report import summary


@click.command()
@click.option("--set", "name", type=click.Choice([*SETS]), default="build", show_default=True, help="Which services.")
@click.option("--only", type=int, multiple=True, help="Seeds of the set; may be repeated. Default: all.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each service, which differ in jitter.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--before", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Figures to compare with.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for the figures, JSON.")
def main(name: str, only: tuple[int, ...], repeats: int, jobs: int, before: Path | None, out: Path | None) -> None:
    """Judge the controller and print a table."""
    known = from_columns(json.loads(before.read_text())) if before else []
    fixed = fixed_of(known)
    work = [(seed, fixed(seed)) for seed in only or SETS[name]]
    rows: list[Row] = []
    with get_context("fork").Pool(jobs, initializer=_be_quiet) as pool:
        for found in pool.imap(partial(_judge, repeats), work):
            rows += found
            if out:
                out.write_text(json.dumps(as_columns(rows), separators=(",", ":")).replace("],[", "],\n[") + "\n")
            click.echo(f"{found[0].seed} ", nl=False, err=True)
    click.echo(summary(rows, known))


def _be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _judge(repeats: int, work: tuple[int, list[Fixed]]) -> list[Row]:
    seed, fixed = work
    return judge(draw(seed), fixed, repeats=repeats)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names would be walked in another order each time
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.verifier.services", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    main()
