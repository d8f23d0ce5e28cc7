"""`specq trace`: shows the events of a job in all processes."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from specq import Client
from specq.cli.options import section_options
from specq.cli.results import JOB_ID
from specq.config import ClientConfig, load, override
from specq.observe import chrome, timeline

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
