"""`specq broker`, `specq worker --role target|draft`, `specq serve` and `specq up`.

Each runs one process, or a whole deployment, until a signal stops it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from specq.cli.options import OWN, OWN_NAMES, RUNNING, key_options, log_options, own_key_options, section_options
from specq.config import (
    NO_MODEL,
    BrokerConfig,
    Config,
    DraftConfig,
    ServeConfig,
    TargetConfig,
    UpConfig,
    load,
    override,
    with_own,
)
from specq.runtime import log, resolve


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


# Keys of [target] for drafting in the verifier's process. They are options here and of `specq worker --role target`.
DRAFTING = (
    "drafts",
    "heads",
    "prompt_lookup",
    "shared_tokens",
    "lookahead",
    "lookahead_window",
    "lookahead_ngram",
    "lookahead_guesses",
)
SERVING = (
    "bind",
    "tls_cert",
    "tls_key",
    "hosts",
    "cors_origins",
)  # keys of [serve], which are also options of `specq serve`


@click.command()
@section_options(UpConfig)
@click.option("--model", help="Target model: a name from `specq models`, a path, or a hub name.  [default: smollm2]")
@click.option(
    "--draft-model",
    help="Draft model, named as in --model. `none`: no draft model in the verifier (draft workers still use one).  "
    "[default: the target's own; for a GGUF file, one with its tokenizer]",
)
@key_options(TargetConfig, RUNNING)
@own_key_options({"target": OWN["target"]})
@key_options(TargetConfig, DRAFTING)
@click.option("--broker", "address", help="Address for the broker to listen on.  [default: tcp://127.0.0.1:5750]")
@click.option("--keys", help="Directory of CURVE keys (`specq keys`) for all processes. Default: no encryption.")
@click.option("--api-keys", help="File of API keys for --serve (`specq keys api`). Default: no authentication.")
@key_options(ServeConfig, SERVING)
@click.option(
    "--journal", help="Journal file. `none`: keep jobs in memory only.  [default: one file per broker address]"
)
@log_options("warning")
@click.pass_context
def up(
    ctx: click.Context,
    /,
    config_file: str | None,
    model: str | None,
    draft_model: str | None,
    address: str | None,
    keys: str | None,
    journal: str | None,
    api_keys: str | None,
    log_level: str,
    *,
    log_json: bool,
    **values: Any,
) -> None:
    """Run a broker, verifiers and drafters on this machine, with --serve also the HTTP gateway.

    The processes share the cores of the machine. Ctrl-C stops them all.

    \b
    Examples:
      specq up
      specq up --serve --model smollm2 --drafters 2
    """
    config: Config = load(config_file)
    names_of_target = (*RUNNING, *DRAFTING, *(name for name in values if name in OWN_NAMES))
    of_target, of_serve = ({name: values.pop(name) for name in names} for names in (names_of_target, SERVING))
    of_target = with_own(of_target, OWN_NAMES)
    config = replace(config, up=override(config.up, **values))
    if not config.up.serve:
        _refuse_given(ctx, {"api_keys": api_keys, **of_serve})
    config = replace(
        config,
        broker=override(config.broker, bind=address, journal=journal, keys=keys),
        target=override(config.target, model=model, keys=keys, **of_target),
        draft=override(config.draft, model=NO_MODEL if draft_model == "" else draft_model, keys=keys),
        serve=override(config.serve, keys=keys, api_keys=api_keys, **of_serve),
    )
    from specq.processes.up import run  # here, since `--help` does not need it

    log_arguments = ["--log-level", log_level, *(["--log-json"] if log_json else [])]
    ctx.exit(run(config, log_arguments))


def _refuse_given(ctx: click.Context, of_serve: Mapping[str, Any]) -> None:
    """Raise UsageError if an option of the gateway is given without --serve."""
    flags = {one.name: one.opts[0] for one in ctx.command.params}
    for name, value in of_serve.items():
        if value is not None:
            raise click.UsageError(f"{flags[name]} is an option of the HTTP gateway; add --serve")
