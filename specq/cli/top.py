"""`specq top`: what a broker sees, as it changes."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any

import click

from specq import Client
from specq.cli.options import Seconds, section_options
from specq.config import ClientConfig, load, override
from specq.observe import SORTS, Snapshot, View, plain


@click.command()
@click.option("--once", is_flag=True, help="Print one snapshot as plain text, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one snapshot as JSON, and exit.")
@click.option(
    "--interval",
    type=Seconds(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks, and of rates.",
)
@click.option(
    "--sessions", type=click.IntRange(0, 1000), default=50, show_default=True, help="List the N busiest sessions."
)
@click.option("--sort", type=click.Choice(list(SORTS)), default="TOK/S", show_default=True, help="Order of sessions.")
@click.option("--filter", "filter_by", default="", help="Only rows that contain this text.")
@section_options(ClientConfig)
def top(
    config_file: str | None,
    interval: float,
    sessions: int,
    sort: str,
    filter_by: str,
    *,
    once: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Watch a broker: workers, sessions, tokens a second, drafts by source, where steps spend their time, queues, last
    faults.

    Keys: q quits, s sorts sessions by the next column, r reverses them, f filters all rows, arrows scroll, p pauses.
    Where keys are on, sessions and failed jobs are one's own; the broker's own key sees all.
    """
    config = override(load(config_file).client, **values)
    is_live = not (once or as_json)
    if is_live and not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise click.UsageError("a live view needs a terminal; --once prints a snapshot, --json one for programs")
    view = View(sort, filter_by=filter_by)
    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys) as client:
        first = client.status(sessions=sessions)  # fails as `specq status` does where there is no broker
        if is_live:
            from specq.observe.screen import watch

            watch(lambda: client.status(sessions=sessions), first, view, interval, config.broker)
            return
        time.sleep(interval)
        snapshot = Snapshot(client.status(sessions=sessions), first)
    if as_json:
        click.echo(json.dumps(snapshot.to_dict(), indent=2))
    else:
        click.echo(plain(snapshot, view, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0))
