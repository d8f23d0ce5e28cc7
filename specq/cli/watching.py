"""`specq status`, `specq top` and `specq trace`: what a broker reports.

status  its state once, without rates
top     its state live, with rates
trace   the events of a job in all processes"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any

import click

from specq import Client
from specq.cli.jobs import JOB_ID
from specq.cli.options import Seconds, section_options
from specq.config import ClientConfig, load, override
from specq.observe import SORTS, Snapshot, View, chrome, plain, timeline


@click.command()
@section_options(ClientConfig)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
def status(config_file: str | None, *, as_json: bool, **values: Any) -> None:
    """Show the workers, jobs and counters of a broker once."""
    config = override(load(config_file).client, **values)
    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys) as client:
        report = client.status()
    click.echo(json.dumps(report, indent=2) if as_json else plain(Snapshot(report), View()))


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


ASK_S, PATIENCE_S = 0.2, 3.0  # workers send their events with heartbeats


@click.command()
@click.argument("job_id", type=JOB_ID, required=False, metavar="[JOB]")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON.")
@click.option(
    "--chrome", "as_chrome", is_flag=True, help="Print the events in Chrome's trace event format, for ui.perfetto.dev."
)
@section_options(ClientConfig)
def trace(config_file: str | None, job_id: int | None, *, as_json: bool, as_chrome: bool, **values: Any) -> None:
    """Show the events of a job in all processes, by the broker's clock. Without JOB, show the last job.

    The broker keeps its own events of the last 256 jobs. The other processes record jobs that
    request it (specq submit --trace, trace=True). They also record a few others (broker.traced_jobs).
    """
    if as_json and as_chrome:
        raise click.UsageError("--json and --chrome exclude each other; give one of them")
    config = override(load(config_file).client, **values)
    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys) as client:
        found = _complete(client, job_id or 0)
    if as_json or as_chrome:
        click.echo(json.dumps(chrome(found) if as_chrome else found))
    else:
        click.echo(timeline(found))


def _complete(client: Client, job_id: int) -> dict[str, Any]:
    """Return a trace. For a finished job, wait up to PATIENCE_S until all processes have sent their events."""
    end = time.monotonic() + PATIENCE_S
    while True:
        found = client.trace(job_id)
        parts = [part for part in found["processes"] if part["role"] != "client"]
        if not found["finish"] or all(part["is_complete"] for part in parts) or time.monotonic() > end:
            return found
        time.sleep(ASK_S)
        job_id = found["job"]
