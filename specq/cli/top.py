"""`specq top`: shows the state of a broker live."""

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
    help="Refresh interval, and the window of rates, in seconds.",
)
@click.option(
    "--sessions",
    type=click.IntRange(0, 1000),
    default=50,
    show_default=True,
    help="Maximum number of sessions to list, busiest first.",
)
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="TOK/S", show_default=True, help="Column to sort sessions by."
)
@click.option("--filter", "filter_by", default="", help="Show only rows that contain this text.  [default: all rows]")
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
    """Watch a broker: workers, sessions, tokens/s, drafts by source, step times, queues and recent faults.

    Keys: q quits, s sorts sessions by the next column, r reverses them, f filters all rows, arrows scroll, p pauses.
    With CURVE keys, you see only your sessions and failed jobs. The broker's key shows all.
    """
    config = override(load(config_file).client, **values)
    is_live = not (once or as_json)
    if is_live and not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise click.UsageError(
            "the live view needs a terminal; use --once for one snapshot, or --json for one snapshot as JSON"
        )
    view = View(sort, filter_by=filter_by)
    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys) as client:
        first = client.status(sessions=sessions)  # without a broker, fails as `specq status` does
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
