"""`specq train pair`: how the bundled pair was made."""

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
@click.option("--bench", type=_FOLDER, default="bench", help="Directory of *.jsonl prompts, read by `evaluate` only.")
@click.option("--work", type=OutFolder(), default=".train", help="Directory for what the stages write and read.")
@click.option("--out", type=OutFolder(), default="pair", help="Where `export` puts target/ and draft/.")
@click.option("--results", type=OutFile(makes_directory=True), default=None, help="A second place for the report.")
@click.option("--device", default="", help="torch device; a GPU if there is one.")
@click.option("--compile/--no-compile", "compiled", default=False, help="Use torch.compile.")
@click.option("--seed", type=SEED, default=17, help="Seed of everything.")
@click.option("--limit", type=COUNT, default=None, help="Most records to read of each shard.")
@click.option("--steps", type=COUNT, default=None, help="Set both numbers of steps at once, for a trial.")
@click.option("--target-steps", type=COUNT, default=2000, help="Optimizer steps of the target.")
@click.option("--draft-steps", type=COUNT, default=4000, help="Optimizer steps of the draft.")
@click.option("--row-length", type=COUNT, default=1024, help="Tokens in a packed row.")
@click.option("--batch-tokens", type=COUNT, default=65536, help="Tokens in a batch.")
@click.option("--target-lr", type=RATE, default=4e-3, help="Peak learning rate of the target.")
@click.option("--draft-lr", type=RATE, default=4e-3, help="Peak learning rate of the draft.")
@click.option("--weight-decay", type=SHARE, default=0.8, help="Decoupled weight decay of the target's matrices.")
@click.option("--closing-share", type=SHARE, default=0.35, help="Share of the steps in which the target's rate falls.")
@click.option("--draft-shape", type=click.Choice(["draft-1", "draft-2"]), default="draft-2", help="1 or 2 layers.")
@click.option("--hard-weight", type=SHARE, default=0.3, help="Weight of the target's first choice in the draft's loss.")
@click.option("--num-rollouts", type=COUNT, default=110000, help="Prompts that the target answers for distillation.")
@click.option("--rollout-tokens", type=COUNT, default=192, help="New tokens of a rollout, at most.")
@click.option("--bench-prompts", type=COUNT, default=100, help="Prompts of each benchmark.")
@click.option("--bench-tokens", type=COUNT, default=128, help="New tokens of a benchmark answer, at most.")
def pair(stage: str, *, steps: int | None, device: str, compiled: bool, **options: Any) -> None:
    """Train a small target and distil a draft from it, then measure and export both.

    STAGE is one step of this work, or `all`. Each stage reads what the earlier ones have written to --work.
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
