"""`specq train pair`: trains a small target and a draft, as done for the bundled pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, COUNT, RATE, SEED, SHARE, run_stages
from specq.runtime import OutFile, OutFolder
from specq.training import PAIR_STAGES
from specq.training.records import bench_paths, shard_paths

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*PAIR_STAGES, ALL_STAGES]))
@click.option("--corpus", type=_FOLDER, default="corpus", help="Directory of *.jsonl.gz shards.")
@click.option("--bench", type=_FOLDER, default="bench", help="Directory of *.jsonl prompts for the stage `evaluate`.")
@click.option("--work", type=OutFolder(), default=".train", help="Directory for intermediate files of the stages.")
@click.option(
    "--out", type=OutFolder(), default="pair", help="Directory where the stage `export` writes target/ and draft/."
)
@click.option("--results", type=OutFile(makes_directory=True), default=None, help="Second file for the report.")
@click.option("--device", default="", help="torch device.  [default: a GPU if present]")
@click.option("--compile/--no-compile", "compiled", default=False, help="Use torch.compile.")
@click.option("--seed", type=SEED, default=17, help="Seed of all random numbers.")
@click.option("--limit", type=COUNT, default=None, help="Maximum number of records to read per shard.  [default: all]")
@click.option("--steps", type=COUNT, default=None, help="Number of steps of both target and draft, for a trial run.")
@click.option("--target-steps", type=COUNT, default=2000, help="Number of optimizer steps of the target.")
@click.option("--draft-steps", type=COUNT, default=4000, help="Number of optimizer steps of the draft.")
@click.option("--row-length", type=COUNT, default=1024, help="Tokens per packed row.")
@click.option("--batch-tokens", type=COUNT, default=65536, help="Tokens per batch.")
@click.option("--target-lr", type=RATE, default=4e-3, help="Peak learning rate of the target.")
@click.option("--draft-lr", type=RATE, default=4e-3, help="Peak learning rate of the draft.")
@click.option("--weight-decay", type=SHARE, default=0.8, help="Decoupled weight decay of the target's matrices.")
@click.option(
    "--closing-share",
    type=SHARE,
    default=0.35,
    help="Share of the steps in which the target's learning rate decreases.",
)
@click.option(
    "--draft-shape",
    type=click.Choice(["draft-1", "draft-2"]),
    default="draft-2",
    help="Shape of the draft: 1 or 2 layers.",
)
@click.option("--hard-weight", type=SHARE, default=0.3, help="Weight of the target's first choice in the draft's loss.")
@click.option(
    "--num-rollouts", type=COUNT, default=110000, help="Number of prompts that the target answers for distillation."
)
@click.option("--rollout-tokens", type=COUNT, default=192, help="Maximum number of new tokens per rollout.")
@click.option("--bench-prompts", type=COUNT, default=100, help="Number of prompts per benchmark.")
@click.option("--bench-tokens", type=COUNT, default=128, help="Maximum number of new tokens per benchmark answer.")
def pair(stage: str, *, steps: int | None, device: str, compiled: bool, **options: Any) -> None:
    """Train a small target and distil a draft from it, then measure and export both.

    STAGE is one step of the training, or `all`. Each stage reads the output of earlier stages in --work.
    """
    if stage in (ALL_STAGES, "tokenizer", "data"):
        shard_paths(options["corpus"])
    if stage in (ALL_STAGES, "evaluate"):
        bench_paths(options["bench"])
    from specq.training.settings import PairSettings, choose_device

    if steps is not None:
        options.update(target_steps=steps, draft_steps=steps)
    settings = PairSettings(device=choose_device(device, compiled=compiled), compiled=compiled, **options)
    run_stages(stage, PAIR_STAGES, settings)
