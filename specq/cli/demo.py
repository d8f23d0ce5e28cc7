"""`specq demo`: starts a deployment, answers three prompts and measures the speedup."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

import click

from specq.cli.options import config_option
from specq.config import load, override
from specq.demo import demo as run_demo

_COUNT = click.IntRange(1)


@click.command()
@config_option
@click.option("--max-tokens", type=_COUNT, default=96, show_default=True, help="Maximum number of tokens per prompt.")
@click.option(
    "--repeats",
    type=_COUNT,
    default=3,
    show_default=True,
    help="Runs per prompt and configuration; the table shows medians.",
)
@click.option("--drafters", type=click.IntRange(0), help="Number of draft workers.  [default: as specq up]")
@click.pass_context
def demo(ctx: click.Context, config_file: str | None, max_tokens: int, repeats: int, drafters: int | None) -> None:
    """Start a deployment as `specq up` does, answer prompts live, and stop it.

    Compares its speed with plain decoding. The exit status is 1 if a text differs.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, to stop all started processes
    config = load(config_file)
    config = replace(config, up=override(config.up, drafters=drafters))
    ctx.exit(0 if run_demo(config, max_tokens, repeats) else 1)
