"""`specq train eagle3`: trains a layer that drafts from the target's hidden states and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, DURATION, OPEN_SHARE, RATE, checked, run_options, run_stages
from specq.training import EAGLE_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*EAGLE_STAGES, ALL_STAGES]))
@run_options("eagle", "the head goes")
@click.option("--seconds", type=DURATION, default=400.0, help="Training time, in seconds.")
@click.option(
    "--start",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=None,
    help="Directory of a head with the same shape and tokens to continue from.  [default: none]",
)
@click.option("--num-steps", type=click.IntRange(1, 16), default=8, help="Number of steps of the training-time test.")
@click.option("--intermediate-size", type=click.IntRange(min=0), default=0, help="Feed-forward size; 0: as the target.")
@click.option("--head-size", type=COUNT, default=16384, help="Maximum size of the head's output vocabulary, in tokens.")
@click.option("--batch-tokens", type=COUNT, default=16384, help="Tokens per batch.")
@click.option(
    "--lr",
    type=RATE,
    default=1e-3,
    help="Peak learning rate of norms, output matrix and the input matrix of the target's states.",
)
@click.option("--matrix-lr", type=RATE, default=4e-3, help="Peak learning rate of the layer's matrices.")
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.85,
    help="Factor of a step's loss weight relative to the previous step.",
)
def eagle3(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Train an EAGLE-3 head, for `--heads`, on the answers of a target. The target does not change.

    STAGE is one step of the training, or `all`. Each stage reads the output of earlier stages in --work and --out.
    An interrupted `head` stage continues when it runs again with the same settings.
    """
    found = checked(stage, EAGLE_STAGES, target, options)
    from specq.training.settings import EagleSettings, choose_device

    settings = EagleSettings(**found, device=choose_device(device, compiled=False))
    run_stages(stage, EAGLE_STAGES, settings)
