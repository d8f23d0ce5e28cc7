"""`specq up`: a broker, verifiers and what drafts for them on this machine, started and stopped together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from specq.cli.options import OWN, OWN_NAMES, RUNNING, key_options, log_options, own_key_options, section_options
from specq.config import Config, ServeConfig, TargetConfig, UpConfig, load, override, with_own

# Keys of [target] that say what drafts in the verifier's process: options here, too, as of `specq worker --role
# target`.
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
SERVING = ("bind", "tls_cert", "tls_key", "hosts", "cors_origins")  # and of [serve], as of `specq serve`


@click.command()
@section_options(UpConfig)
@click.option("--model", help="Target model: a name of `specq models`, a path, or a hub name.  [default: smollm2]")
@click.option(
    "--draft-model",
    help="Draft model, likewise; empty: none, but in workers that --drafters asks for.  [default: the target's own, if "
    "it has one]",
)
@key_options(TargetConfig, RUNNING)
@own_key_options({"target": OWN["target"]})
@key_options(TargetConfig, DRAFTING)
@click.option("--broker", "address", help="Address to bind the broker to.  [default: tcp://127.0.0.1:5750]")
@click.option("--keys", help="Directory of CURVE keys (specq keys) for all of them; none: no encryption.")
@click.option("--api-keys", help="File of API keys for --serve (specq keys api); none: everyone may ask.")
@key_options(ServeConfig, SERVING)
@click.option("--journal", help="File that outlives the broker; none: memory only.  [default: one for each address]")
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
    """Run a broker, verifiers and what drafts for them (with --serve also the HTTP gateway) on this machine, dividing
    its cores among them; Ctrl-C stops them all."""
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
        draft=override(config.draft, model=draft_model, keys=keys),
        serve=override(config.serve, keys=keys, api_keys=api_keys, **of_serve),
    )
    from specq.processes.deployment import without_draft_model  # here, since `--help` needs none of it
    from specq.processes.up import run

    if draft_model == "":
        config = without_draft_model(config)
    log_arguments = ["--log-level", log_level, *(["--log-json"] if log_json else [])]
    ctx.exit(run(config, log_arguments))


def _refuse_given(ctx: click.Context, of_serve: Mapping[str, Any]) -> None:
    """Raise UsageError for an option of the gateway that was given, where no gateway is started."""
    flags = {one.name: one.opts[0] for one in ctx.command.params}
    for name, value in of_serve.items():
        if value is not None:
            raise click.UsageError(f"{flags[name]} says how HTTP is served, which needs --serve as well")
