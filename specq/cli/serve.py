"""`specq serve`: runs the HTTP gateway until a signal stops it."""

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
    """Run the OpenAI-compatible HTTP gateway of a broker (docs/http-api.md).

    \b
    Examples:
      specq serve
      specq serve --bind tcp://127.0.0.1:8001 --cors-origin https://chat.example.org
    """
    config = override(load(config_file).serve, **values)
    log.configure(log_level, as_json=log_json)
    from specq.processes.gateway import run  # here, since `--help` does not need it

    ctx.exit(run(config))
