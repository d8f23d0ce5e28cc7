"""`specq demo`: a broker, a verifier and drafters at work on this machine, and how fast they are."""

from __future__ import annotations

import signal
import sys

import click

from specq.bench.demo import demo as run_demo

_COUNT = click.IntRange(1)


@click.command()
@click.option("--max-tokens", type=_COUNT, default=96, show_default=True, help="Most tokens for each prompt.")
@click.option("--repeats", type=_COUNT, default=3, show_default=True, help="Runs of each prompt and way, for medians.")
@click.option("--drafters", type=click.IntRange(0), default=2, show_default=True, help="Draft workers.")
def demo(max_tokens: int, repeats: int, drafters: int) -> None:
    """Start a broker, a verifier and drafters, show them at work, measure them, and stop them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that no process is left behind
    run_demo(max_tokens, repeats, drafters)
