"""`specq train medusa`: heads that draft from a target's own hidden states."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, DURATION, checked, heads_options, run_options, run_stages
from specq.training import MEDUSA_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*MEDUSA_STAGES, ALL_STAGES]))
@run_options("heads", "the heads go")
@click.option("--seconds", type=DURATION, default=270.0, help="How long to train.")
@heads_options
def medusa(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Train Medusa-1 heads, for `--heads`, on what a target answers; the target stays as it is.

    STAGE is one step of this work, or `all`. Each stage reads what the earlier ones have written to --work and --out. `heads` goes on where
    a run with the same settings was cut off.
    """
    found = checked(stage, MEDUSA_STAGES, target, options)
    from specq.training.draft_settings import MedusaSettings
    from specq.training.settings import choose_device

    settings = MedusaSettings(**found, device=choose_device(device, compiled=False))
    run_stages(stage, MEDUSA_STAGES, settings)
