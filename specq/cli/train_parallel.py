"""`specq train parallel`: a draft model that foresees several tokens in one pass."""

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
    show_default="the one that comes with the target",
    help="The draft model to start from: a name of `specq models`, or a directory.",
)
@click.option(
    "--share/--no-share",
    default=False,
    help="Whether the embedding and the head stay those of the model that it starts from, and are left out of what is "
    "written.",
)
@click.option("--seconds", type=DURATION, default=800.0, help="How long to train.")
@click.option("--num-places", type=click.IntRange(2, 16), default=5, help="How many tokens one pass drafts.")
@click.option(
    "--keep", type=OPEN_SHARE, default=0.7, help="Of the tokens with a mask at a place, the share with one at the next."
)
@click.option(
    "--least-keep", type=OPEN_SHARE, default=0.2, help="The least share of all tokens with a mask at a place."
)
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.85,
    help="What the loss of a place counts, times that of the one before it.",
)
@click.option(
    "--head-size",
    type=COUNT,
    default=16384,
    help="Most tokens that the draft may say, where the one that it starts from may say any.",
)
@click.option("--batch-tokens", type=COUNT, default=8192, help="Tokens in a batch, without masks.")
@click.option("--lr", type=RATE, default=5e-4, help="Peak learning rate of embedding, masks, head and norms.")
@click.option("--matrix-lr", type=RATE, default=2e-3, help="Peak learning rate of the layers' matrices.")
def parallel(stage: str, *, target: str, start: str, device: str, **options: Any) -> None:
    """Train a parallel draft model, for `--draft-model` and draft workers, from a target's autoregressive one, on what
    the target answers.

    STAGE is one step of this work, or `all`. Each stage reads what the earlier ones have written to --work and --out.
    `draft` goes on where a run with the same settings was cut off.
    """
    resolve_model(target, "target")  # one that is not there has no draft model either, and that is not the reason
    named = start or draft_for(target)
    if not named:
        raise ConfigError(f"no draft model comes with {target}; name the one to start from by --draft")
    found = checked(stage, PARALLEL_STAGES, target, options)
    draft = Path(resolve_model(named, "draft"))
    from specq.training.settings import ParallelSettings, choose_device

    settings = ParallelSettings(**found, draft=draft, device=choose_device(device, compiled=False))
    run_stages(stage, PARALLEL_STAGES, settings)
