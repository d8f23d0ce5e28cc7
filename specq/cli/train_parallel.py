"""`specq train parallel`: trains a draft model that predicts several tokens in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, DURATION, OPEN_SHARE, RATE, checked, run_options, run_stages
from specq.models import draft_for, resolve_model
from specq.protocol import ConfigError
from specq.training import PARALLEL_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*PARALLEL_STAGES, ALL_STAGES]))
@run_options("parallel", "the draft model goes")
@click.option(
    "--draft",
    "start",
    default="",
    show_default="the target's own",
    help="Draft model to start from: a name from `specq models`, or a directory.",
)
@click.option(
    "--share/--no-share",
    default=False,
    help="Keep the embedding and the head of the start model unchanged, and leave them out of the output.",
)
@click.option("--seconds", type=DURATION, default=800.0, help="Training time, in seconds.")
@click.option("--num-places", type=click.IntRange(2, 16), default=5, help="Number of tokens to draft per pass.")
@click.option(
    "--keep",
    type=OPEN_SHARE,
    default=0.7,
    help="Share of the tokens with a mask at one place that also have one at the next place.",
)
@click.option(
    "--least-keep", type=OPEN_SHARE, default=0.2, help="Minimum share of all tokens with a mask at each place."
)
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.85,
    help="Factor of a place's loss weight relative to the previous place.",
)
@click.option(
    "--head-size",
    type=COUNT,
    default=16384,
    help="Maximum size of the draft's output vocabulary in tokens, if the start model has the full one.",
)
@click.option("--batch-tokens", type=COUNT, default=8192, help="Tokens per batch, without masks.")
@click.option("--lr", type=RATE, default=5e-4, help="Peak learning rate of embedding, masks, head and norms.")
@click.option("--matrix-lr", type=RATE, default=2e-3, help="Peak learning rate of the layers' matrices.")
def parallel(stage: str, *, target: str, start: str, device: str, **options: Any) -> None:
    """Train a parallel draft model, for `--draft-model` and draft workers.

    Training starts from the target's autoregressive draft model and uses the answers of the target.

    STAGE is one step of the training, or `all`. Each stage reads the output of earlier stages in --work and --out.
    An interrupted `draft` stage continues when it runs again with the same settings.
    """
    resolve_model(target, "target")  # report a missing target first; it has no draft model either
    named = start or draft_for(target)
    if not named:
        raise ConfigError(f"the target {target} has no draft model; name one to start from with --draft")
    found = checked(stage, PARALLEL_STAGES, target, options)
    draft = Path(resolve_model(named, "draft"))
    from specq.training.settings import ParallelSettings, choose_device

    settings = ParallelSettings(**found, draft=draft, device=choose_device(device, compiled=False))
    run_stages(stage, PARALLEL_STAGES, settings)
