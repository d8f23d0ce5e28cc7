"""`specq train draft`: distils a draft model, as done for `smollm2`."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, DURATION, RATE, checked, run_options, run_stages
from specq.training import DRAFT_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*DRAFT_STAGES, ALL_STAGES]))
@run_options("draft", "the draft model goes")
@click.option("--seconds", type=DURATION, default=800.0, help="Training time, in seconds.")
@click.option("--hidden-size", type=COUNT, default=256, help="Hidden size of the draft.")
@click.option("--intermediate-size", type=COUNT, default=768, help="Feed-forward size of the draft.")
@click.option("--num-layers", type=COUNT, default=4, help="Layers of the draft.")
@click.option("--head-dim", type=COUNT, default=64, help="Size of each attention head.")
@click.option("--embedding-rank", type=COUNT, default=64, help="Rank of the input embedding.")
@click.option(
    "--head-size", type=COUNT, default=16384, help="Maximum size of the draft's output vocabulary, in tokens."
)
@click.option("--batch-tokens", type=COUNT, default=24576, help="Tokens per batch.")
@click.option("--lr", type=RATE, default=1.5e-3, help="Peak learning rate of embedding, head and norms.")
@click.option("--matrix-lr", type=RATE, default=6e-3, help="Peak learning rate of the layers' matrices.")
def draft(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Distil a small draft model, for `--draft-model`, from the answers of a target.

    STAGE is one step of the training, or `all`. Each stage reads the output of earlier stages in --work and --out.
    """
    found = checked(stage, DRAFT_STAGES, target, options)
    from specq.training.settings import DraftSettings, choose_device

    settings = DraftSettings(**found, device=choose_device(device, compiled=False))
    run_stages(stage, DRAFT_STAGES, settings)
