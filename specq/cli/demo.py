"""`specq demo`: what `specq up` starts, at work on this machine, and how fast it is."""

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
@click.option("--max-tokens", type=_COUNT, default=96, show_default=True, help="Most tokens for each prompt.")
@click.option("--repeats", type=_COUNT, default=3, show_default=True, help="Runs of each prompt and way, for medians.")
@click.option("--drafters", type=click.IntRange(0), help="Draft workers.  [default: as specq up]")
@click.pass_context
def demo(ctx: click.Context, config_file: str | None, max_tokens: int, repeats: int, drafters: int | None) -> None:
    """Start what `specq up` does, show it at work, measure it against plain decoding, and stop it. The exit status is 1
    where a text differs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that no process is left behind
    config = load(config_file)
    config = replace(config, up=override(config.up, drafters=drafters))
    ctx.exit(0 if run_demo(config, max_tokens, repeats) else 1)
