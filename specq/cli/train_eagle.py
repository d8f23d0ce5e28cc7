"""`specq train eagle3`: a layer that drafts from a target's hidden states, and from its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, DURATION, OPEN_SHARE, RATE, checked, run_options, run_stages
from specq.training import EAGLE_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*EAGLE_STAGES, ALL_STAGES]))
@run_options("eagle", "the head goes")
@click.option("--seconds", type=DURATION, default=400.0, help="How long to train.")
@click.option(
    "--start",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=None,
    help="Directory of a head of the same shape to go on from, with its tokens.  [default: none]",
)
@click.option("--num-steps", type=click.IntRange(1, 16), default=8, help="Steps of the training-time test.")
@click.option("--intermediate-size", type=click.IntRange(min=0), default=0, help="Feed-forward size; 0: the target's.")
@click.option("--head-size", type=COUNT, default=16384, help="Most tokens that the head may say.")
@click.option("--batch-tokens", type=COUNT, default=16384, help="Tokens in a batch.")
@click.option(
    "--lr",
    type=RATE,
    default=1e-3,
    help="Peak learning rate of norms, output matrix and what the target's states go into.",
)
@click.option("--matrix-lr", type=RATE, default=4e-3, help="Peak learning rate of the layer's matrices.")
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.85,
    help="What the loss of a step counts, times that of the one before it.",
)
def eagle3(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Train an EAGLE-3 head, for `--heads`, on what a target answers; the target stays as it is.

    STAGE is one step of this work, or `all`. Each stage reads what the earlier ones have written to --work and --out.
    `head` goes on where a run with the same settings was cut off.
    """
    found = checked(stage, EAGLE_STAGES, target, options)
    from specq.training.settings import EagleSettings, choose_device

    settings = EagleSettings(**found, device=choose_device(device, compiled=False))
    run_stages(stage, EAGLE_STAGES, settings)
