"""`specq train medusa`: trains heads that draft from the hidden states of the target."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, DURATION, OPEN_SHARE, RATE, checked, run_options, run_stages
from specq.training import MEDUSA_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*MEDUSA_STAGES, ALL_STAGES]))
@run_options("heads", "the heads go")
@click.option("--seconds", type=DURATION, default=270.0, help="Training time, in seconds.")
@click.option(
    "--num-heads",
    type=click.IntRange(1, 16),
    default=4,
    help="Number of heads, which is the number of tokens drafted at once.",
)
@click.option("--num-layers", type=click.IntRange(1, 8), default=1, help="Number of residual blocks per head.")
@click.option(
    "--own-output/--shared-output",
    default=False,
    help="Give each head its own output matrix, as in Medusa, or share the target's.",
)
@click.option("--head-size", type=COUNT, default=16384, help="Maximum size of the heads' output vocabulary, in tokens.")
@click.option("--batch-tokens", type=COUNT, default=16384, help="Tokens per batch.")
@click.option("--lr", type=RATE, default=1e-3, help="Peak learning rate of biases and output matrices.")
@click.option("--matrix-lr", type=RATE, default=4e-3, help="Peak learning rate of the blocks' matrices.")
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.8,
    help="Factor of a head's loss weight relative to the previous head.",
)
def medusa(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Train Medusa-1 heads, for `--heads`, on the answers of a target. The target does not change.

    STAGE is one step of the training, or `all`. Each stage reads the output of earlier stages in --work and --out.
    An interrupted `heads` stage continues when it runs again with the same settings.
    """
    found = checked(stage, MEDUSA_STAGES, target, options)
    from specq.training.settings import MedusaSettings, choose_device

    settings = MedusaSettings(**found, device=choose_device(device, compiled=False))
    run_stages(stage, MEDUSA_STAGES, settings)
