"""`specq train medusa2`: heads that draft from a target's own hidden states, and the target, trained together with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, DURATION, RATE, checked, heads_options, run_options, run_stages
from specq.runtime import Number
from specq.training import MEDUSA2_STAGES


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*MEDUSA2_STAGES, ALL_STAGES]))
@run_options("medusa2", "target/ and heads/ go")
@click.option("--name", default="", show_default="that of the target, and -medusa2", help="Name of the new target.")
@click.option("--warm-up-seconds", type=DURATION, default=270.0, help="How long to train the heads alone.")
@click.option("--seconds", type=DURATION, default=540.0, help="How long to train heads and target together.")
@click.option("--rank", type=COUNT, default=32, help="Rank of what changes a matrix of the target.")
@click.option("--backbone-lr", type=RATE, default=2e-4, help="Peak learning rate of what changes the target.")
@click.option(
    "--heads-weight",
    type=Number(0, 1000, min_open=True),
    default=0.2,
    help="What the loss of the heads counts beside that of the target.",
)
@heads_options
def medusa2(stage: str, *, target: str, name: str, device: str, **options: Any) -> None:
    """Train Medusa-2 heads and their target together, on what the target answers: OUT/target, a target of its own that says nearly the same, and
    OUT/heads, for `--heads`.

    STAGE is one step of this work, or `all`. Each stage reads what the earlier ones have written to --work and --out. `heads` (the heads alone)
    and `joint` (both together) go on where a run with the same settings was cut off; `heads` also where `specq train medusa` ended.
    """
    found = checked(stage, MEDUSA2_STAGES, target, options)
    from specq.training.draft_settings import JointSettings
    from specq.training.settings import choose_device

    place = choose_device(device, compiled=False)
    settings = JointSettings(**found, name=name or f"{Path(target).stem}-medusa2", device=place)
    run_stages(stage, MEDUSA2_STAGES, settings)
