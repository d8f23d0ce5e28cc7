"""What all suites of `specq bench` share: `--out`, `--commit`, and the end by SIGTERM."""

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


_OUT = click.option("--out", type=OutFile(), help="JSON file for all figures.")
_COMMIT = click.option("--commit", default="", help="Commit of the measured code.  [default: from git]")


def suite(name: str) -> Callable[[Function], click.Command]:
    """Turn a function whose first argument is a `Report` into the command of a suite."""

    def decorate(measure: Function) -> click.Command:
        @wraps(measure)
        def call(*, out: Path | None, commit: str, **options: Any) -> None:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that all child processes stop
            report = Report(name, out, commit)
            measure(report, **options)
            report.check_written()

        return click.command(name)(_OUT(_COMMIT(call)))

    return decorate


def options(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Join options that several suites share; `--help` lists them in the given order."""

    def decorate(function: Function) -> Function:
        for add in reversed(decorators):
            function = add(function)
        return function

    return decorate


def option(names: str, kind: Any, default: Any, text: str, **more: Any) -> Callable[[Function], Function]:
    """Return an option whose help shows its default.

    names          those of `click.option`, separated by spaces.
    show_default   the help text for a default that is only known later.
    """
    shown = more.pop("show_default", default not in ("", ()))
    if isinstance(shown, str) and not callable(default):
        text, shown = f"{text}  [default: {shown}]", False
    return click.option(*names.split(), type=kind, default=default, show_default=shown, help=text, **more)


def repeatable(names: str, kind: Any, default: Any, text: str, **more: Any) -> Callable[[Function], Function]:
    """Return an option that may be repeated."""
    text = f"{text.removesuffix('.')}; may be repeated." if text else "May be repeated."
    return option(names, kind, default, text, multiple=True, **more)


serving_options = options(
    repeatable("--dataset", str, (), "Prompts: gsm8k, humaneval, or a JSONL file.", show_default="both"),
    option("--numseqs", COUNT, 20, "Number of prompts from each data set."),
    option("--output-len", COUNT, 128, "Maximum tokens for each prompt."),
    click.option("--ignore-eos", is_flag=True, help="Always generate the maximum, past the end of the text."),
    option("--concurrency", COUNT, 1, "Number of specq's sessions in flight."),
    option("--seed", click.IntRange(0), 0, "Seed of all sampling."),
    option("--repeats", COUNT, 3, "Number of interleaved repetitions."),
    option("--drafters", COUNT, 1, "Number of specq's draft workers."),
    option("--keys", str, "", "Directory of CURVE keys (specq keys). Default: no encryption."),
)
