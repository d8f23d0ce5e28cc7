"""`specq doctor`: checks the installation, measures a model pair and recommends a command."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import click

from specq.cli.options import OWN, OWN_NAMES, RUNNING, config_option, key_options, own_key_options
from specq.config import ClientConfig, TargetConfig, load, override, with_own
from specq.runtime import log

DEFAULT_SESSIONS = (1, 8)
PROMPTS_EACH = 4  # prompts per data set for a running deployment


@click.command()
@config_option
@click.option(
    "--model", help="Target model: a name from `specq models`, a path, or a hub name.  [default: as specq up]"
)
@click.option("--draft-model", help="Draft model, named as in --model, or `none`.  [default: as specq up]")
@click.option(
    "--heads",
    help="Medusa heads, EAGLE-3 head or block drafter: a directory or a name from `specq models`.  [default: none]",
)
@key_options(TargetConfig, RUNNING)
@own_key_options({"target": OWN["target"]})
@click.option(
    "--sessions",
    type=click.IntRange(1, 1024),
    multiple=True,
    default=DEFAULT_SESSIONS,
    show_default=True,
    help="Number of concurrent sessions to predict speeds for. Repeatable.",
)
@click.option(
    "--broker",
    metavar="ADDRESS",
    help="Check a running deployment instead: compare its texts and speed with and without drafts. Say who drafts for "
    "whom.",
)
@click.option("--quick", is_flag=True, help="Run only the checks, without measurements and predictions.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    config_file: str | None,
    model: str | None,
    draft_model: str | None,
    heads: str | None,
    sessions: tuple[int, ...],
    broker: str | None,
    *,
    quick: bool,
    as_json: bool,
    **running: Any,
) -> None:
    """Check this installation, measure a model pair, predict speedups, and recommend a command.

    The exit status is 1 if a check fails.
    """
    from specq.doctor import Question, examine, lines  # here, since `--help` does not need it

    log.configure("error")
    config = load(config_file)
    if broker is not None:
        _ask_service(ctx, override(config.client, broker=broker), as_json=as_json)
    config = replace(
        config,
        target=override(config.target, model=model, heads=heads, **with_own(running, OWN_NAMES)),
        draft=override(config.draft, model=draft_model),
    )
    question = Question(config, tuple(sorted(set(sessions))), is_quick=quick)
    found = examine(question, lambda line: click.echo(line, err=True))
    for part in [json.dumps(found.to_dict(), indent=2)] if as_json else lines(found):
        click.echo(part)
    ctx.exit(0 if found.is_sound else 1)


def _ask_service(ctx: click.Context, config: ClientConfig, *, as_json: bool) -> None:
    """Check a running deployment, and exit."""
    from specq import Client
    from specq.doctor import examine_service, who_drafts

    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys) as client:
        found = examine_service(client, PROMPTS_EACH, lambda line: click.echo(line, err=True))
        drafting = who_drafts(client.status()["workers"])
    said = found.to_dict() | {"drafting": [asdict(check) for check in drafting]}
    told = [f"{check.name}: {check.status}: {check.found}" for check in drafting]
    for part in [json.dumps(said, indent=2)] if as_json else [*found.lines(), *told]:
        click.echo(part)
    ctx.exit(0 if found.is_sound else 1)
