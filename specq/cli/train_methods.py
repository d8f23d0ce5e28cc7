"""The commands of `specq train`: one for each method. `specq.training` has what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specq.cli.train_stages import (
    ALL_STAGES,
    COUNT,
    DURATION,
    OPEN_SHARE,
    RATE,
    SEED,
    SHARE,
    run_method,
    run_options,
    run_stages,
)
from specq.models import draft_for, resolve_model
from specq.protocol import ConfigError
from specq.runtime import OutFile, OutFolder
from specq.training import BLOCK_STAGES, DRAFT_STAGES, EAGLE_STAGES, MEDUSA_STAGES, PAIR_STAGES, PARALLEL_STAGES
from specq.training.records import bench_paths, shard_paths


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
    run_method(stage, DRAFT_STAGES, "DraftSettings", target, device, options)


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*PARALLEL_STAGES, ALL_STAGES]))
@run_options("parallel", "the draft model goes")
@click.option(
    "--draft",
    "start",
    default="",
    show_default="the target's own",
    help="Draft model to start from: a name from `specq models`, or a directory.",
)
@click.option(
    "--share/--no-share",
    default=False,
    help="Keep the embedding and the head of the start model unchanged, and leave them out of the output.",
)
@click.option("--seconds", type=DURATION, default=800.0, help="Training time, in seconds.")
@click.option("--num-places", type=click.IntRange(2, 16), default=5, help="Number of tokens to draft per pass.")
@click.option(
    "--keep",
    type=OPEN_SHARE,
    default=0.7,
    help="Share of the tokens with a mask at one place that also have one at the next place.",
)
@click.option(
    "--least-keep", type=OPEN_SHARE, default=0.2, help="Minimum share of all tokens with a mask at each place."
)
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.85,
    help="Factor of a place's loss weight relative to the previous place.",
)
@click.option(
    "--head-size",
    type=COUNT,
    default=16384,
    help="Maximum size of the draft's output vocabulary in tokens, if the start model has the full one.",
)
@click.option("--batch-tokens", type=COUNT, default=8192, help="Tokens per batch, without masks.")
@click.option("--lr", type=RATE, default=5e-4, help="Peak learning rate of embedding, masks, head and norms.")
@click.option("--matrix-lr", type=RATE, default=2e-3, help="Peak learning rate of the layers' matrices.")
def parallel(stage: str, *, target: str, start: str, device: str, **options: Any) -> None:
    """Train a parallel draft model, for `--draft-model` and draft workers.

    Training starts from the target's autoregressive draft model and uses the answers of the target.

    STAGE is one step of the training, or `all`. Each stage reads the output of earlier stages in --work and --out.
    An interrupted `draft` stage continues when it runs again with the same settings.
    """
    resolve_model(target, "target")  # report a missing target first; it has no draft model either
    named = start or draft_for(target)
    if not named:
        raise ConfigError(f"the target {target} has no draft model; name one to start from with --draft")
    options["draft"] = Path(resolve_model(named, "draft"))
    run_method(stage, PARALLEL_STAGES, "ParallelSettings", target, device, options)


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
    run_method(stage, MEDUSA_STAGES, "MedusaSettings", target, device, options)


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
    run_method(stage, EAGLE_STAGES, "EagleSettings", target, device, options)


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*BLOCK_STAGES, ALL_STAGES]))
@run_options("block", "the drafter goes")
@click.option("--seconds", type=DURATION, default=800.0, help="Training time, in seconds.")
@click.option(
    "--block-size",
    type=click.IntRange(2, 64),
    default=8,
    help="Tokens of a block: the last known one and the drafted ones.",
)
@click.option("--num-layers", type=click.IntRange(1, 32), default=5, help="Layers of the drafter.")
@click.option(
    "--num-states", type=click.IntRange(1, 16), default=5, help="Number of the target's layers whose states it reads."
)
@click.option("--num-anchors", type=COUNT, default=32, help="Blocks per row of a batch.")
@click.option(
    "--head-size", type=COUNT, default=16384, help="Maximum number of tokens that the drafter can draft, by frequency."
)
@click.option("--batch-tokens", type=COUNT, default=24576, help="Tokens per batch, without blocks.")
@click.option(
    "--lr",
    type=RATE,
    default=1e-3,
    help="Peak learning rate of norms, mask and the matrix of the target's states.",
)
@click.option("--matrix-lr", type=RATE, default=4e-3, help="Peak learning rate of the layers' matrices.")
@click.option(
    "--depth-decay",
    type=OPEN_SHARE,
    default=0.78,
    help="Factor of a place's loss weight relative to the previous place.",
)
@click.option(
    "--off-path",
    type=SHARE,
    default=0.3,
    help="Loss weight of a place behind a token that is not the target's likeliest one.",
)
def block(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Train a block drafter, for `--heads`, on the answers of a target. The target does not change.

    STAGE is one step of the training, or `all`. Each stage reads the output of earlier stages in --work and --out.
    An interrupted `drafter` stage continues when it runs again with the same settings.
    """
    run_method(stage, BLOCK_STAGES, "BlockSettings", target, device, options)


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
@click.option("--device", default="", show_default=False, help="torch device.  [default: a GPU if present]")
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
