"""`specq worker --role target|draft`: runs one worker until a signal stops it."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.options import OWN, OWN_NAMES, log_options, section_options
from specq.config import DraftConfig, TargetConfig, load, override, with_own
from specq.runtime import log, resolve

PROCESSES = {"target": "specq.processes.target:run", "draft": "specq.processes.draft:run"}


@click.command()
@click.option(
    "--role",
    type=click.Choice(tuple(PROCESSES)),
    required=True,
    help="Role of the worker: verifier (target) or draft worker (draft).",
)
@section_options(TargetConfig, DraftConfig, own=OWN)
@log_options("info")
@click.pass_context
def worker(
    ctx: click.Context, /, role: str, config_file: str | None, log_level: str, *, log_json: bool, **values: Any
) -> None:
    """Run one verifier, which checks drafts and commits tokens, or one draft worker, which drafts tokens ahead.

    \b
    Examples:
      specq worker --role target --model smollm2
      specq worker --role draft --model smollm2 --broker tcp://127.0.0.1:5750
    """
    config = override(getattr(load(config_file), role), **with_own(values, OWN_NAMES))
    log.configure("debug" if getattr(config, "verbose", False) else log_level, as_json=log_json)
    ctx.exit(resolve("role", PROCESSES, role)(config))
