"""`specq serve`: run the HTTP gateway until it is told to stop."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.options import log_options, section_options
from specq.config import ServeConfig, load, override
from specq.runtime import log


@click.command()
@section_options(ServeConfig)
@log_options("info")
@click.pass_context
def serve(ctx: click.Context, /, config_file: str | None, log_level: str, *, log_json: bool, **values: Any) -> None:
    """Serve OpenAI's HTTP API in front of a broker; see docs/http-api.md."""
    config = override(load(config_file).serve, **values)
    log.configure(log_level, as_json=log_json)
    from specq.processes.gateway import run  # here, since `--help` needs none of it

    ctx.exit(run(config))
