"""`specq train medusa`: heads that draft from a target's own hidden states."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, DURATION, OPEN_SHARE, RATE, checked, run_options, run_stages
from specq.training import MEDUSA_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*MEDUSA_STAGES, ALL_STAGES]))
@run_options("heads", "the heads go")
@click.option("--seconds", type=DURATION, default=270.0, help="How long to train.")
@click.option("--num-heads", type=click.IntRange(1, 16), default=4, help="Heads: how many tokens are drafted at once.")
@click.option("--num-layers", type=click.IntRange(1, 8), default=1, help="Residual blocks of each head.")
@click.option(
    "--own-output/--shared-output",
    default=False,
    help="Whether each head has an output matrix of its own, as Medusa's, or all use the target's.",
)
@click.option("--head-size", type=COUNT, default=16384, help="Most tokens that the heads may say.")
@click.option("--batch-tokens", type=COUNT, default=16384, help="Tokens in a batch.")
@click.option("--lr", type=RATE, default=1e-3, help="Peak learning rate of biases and output matrices.")
@click.option("--matrix-lr", type=RATE, default=4e-3, help="Peak learning rate of the blocks' matrices.")
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.8,
    help="What the loss of a head counts, times that of the one before it.",
)
def medusa(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Train Medusa-1 heads, for `--heads`, on what a target answers; the target stays as it is.

    STAGE is one step of this work, or `all`. Each stage reads what the earlier ones have written to --work and --out.
    `heads` goes on where a run with the same settings was cut off.
    """
    found = checked(stage, MEDUSA_STAGES, target, options)
    from specq.training.settings import MedusaSettings, choose_device

    settings = MedusaSettings(**found, device=choose_device(device, compiled=False))
    run_stages(stage, MEDUSA_STAGES, settings)
