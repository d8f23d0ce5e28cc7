"""`specq broker`: runs the broker until a signal stops it."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.options import log_options, section_options
from specq.config import BrokerConfig, load, override
from specq.runtime import log


@click.command()
@section_options(BrokerConfig)
@log_options("info")
@click.pass_context
def broker(ctx: click.Context, /, config_file: str | None, log_level: str, *, log_json: bool, **values: Any) -> None:
    """Run the broker, which accepts jobs, routes drafts and verdicts, and stores each job's transcript.

    \b
    Examples:
      specq broker
      specq broker --bind tcp://127.0.0.1:6000 --journal none
    """
    config = override(load(config_file).broker, **values)
    log.configure(log_level, as_json=log_json)
    from specq.processes.broker import run  # here, since `--help` does not need it

    ctx.exit(run(config))
