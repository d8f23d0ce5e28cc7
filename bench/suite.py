"""What all suites of `specq bench` have in common: `--out`, `--commit`, and the end by SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from bench.report import Report
from specq.runtime import OutFile

COUNT = click.IntRange(1)
Function = Callable[..., Any]


_OUT = click.option("--out", type=OutFile(), help="File for all figures, JSON.")
_COMMIT = click.option("--commit", default="", help="Commit of the code that runs.  [default: what git says]")


def suite(name: str) -> Callable[[Function], click.Command]:
    """Make a function whose first argument is a `Report` the command of a suite."""

    def decorate(measure: Function) -> click.Command:
        @wraps(measure)
        def call(*, out: Path | None, commit: str, **options: Any) -> None:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that no process is left behind
            report = Report(name, out, commit)
            measure(report, **options)
            report.check_written()

        return click.command(name)(_OUT(_COMMIT(call)))

    return decorate


def options(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Join options that several suites have; in `--help` they stand in the order given."""

    def decorate(function: Function) -> Function:
        for add in reversed(decorators):
            function = add(function)
        return function

    return decorate


serving_options = options(
    click.option(
        "--dataset", multiple=True, help="gsm8k, humaneval, or a JSONL file; may be repeated.  [default: both]"
    ),
    click.option("--numseqs", type=COUNT, default=20, show_default=True, help="Prompts of each data set."),
    click.option("--output-len", type=COUNT, default=128, show_default=True, help="Most tokens for each prompt."),
    click.option("--ignore-eos", is_flag=True, help="Always that many tokens, past the end of the text."),
    click.option("--concurrency", type=COUNT, default=1, show_default=True, help="Sessions of specq in flight."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all sampling."),
    click.option("--repeats", type=COUNT, default=3, show_default=True, help="Interleaved repetitions of everything."),
    click.option("--drafters", type=COUNT, default=1, show_default=True, help="Draft workers of specq."),
    click.option(
        "--keys", default="", help="Directory of CURVE keys (specq keys) for all of specq; none: no encryption."
    ),
)
