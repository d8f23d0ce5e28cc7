"""`specq train draft`: how the draft model of `smollm2` was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specq.cli.train_stages import ALL_STAGES, run_stages
from specq.models import resolve_model
from specq.training import DRAFT_STAGES

_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice([*DRAFT_STAGES, ALL_STAGES]))
@click.option("--target", required=True, help="A name of `specq models`, a directory, or a GGUF file; Llama or Qwen2.")
@click.option("--corpus", type=_FOLDER, default="corpus", help="Directory of *.jsonl.gz shards, for prompts.")
@click.option("--bench", type=_FOLDER, default="bench", help="Directory of *.jsonl prompts, read by `evaluate` only.")
@click.option("--work", type=_FOLDER, default=".train", help="Directory for rollouts and the report.")
@click.option("--out", type=_FOLDER, default="draft", help="Where the draft model goes.")
@click.option("--results", type=_FILE, default=None, help="A second place for the report.")
@click.option(
    "--rollouts", type=_FILE, multiple=True, show_default=False, help="Also learn from this .npz file; repeatable."
)
@click.option("--device", default="", help="torch device; a GPU if there is one.")
@click.option("--seed", default=17, help="Seed of everything.")
@click.option("--limit", type=int, default=None, help="Most records to read of each shard.")
@click.option("--seconds", default=800.0, help="How long to train.")
@click.option("--rollout-seconds", default=600.0, help="How long the target answers; the batch under way is finished.")
@click.option("--rollout-rows", default=2048, help="Prompts in a batch of rollouts.")
@click.option("--rollout-tokens", default=256, help="New tokens of a rollout, at most.")
@click.option("--hidden-size", default=256, help="Hidden size of the draft.")
@click.option("--intermediate-size", default=768, help="Feed-forward size of the draft.")
@click.option("--num-layers", default=4, help="Layers of the draft.")
@click.option("--head-dim", default=64, help="Size of an attention head.")
@click.option("--embedding-rank", default=64, help="Rank of the input embedding.")
@click.option("--head-size", default=16384, help="Most tokens that the draft may say.")
@click.option("--batch-tokens", default=24576, help="Tokens in a batch.")
@click.option("--lr", default=1.5e-3, help="Peak learning rate of embedding, head and norms.")
@click.option("--matrix-lr", default=6e-3, help="Peak learning rate of the layers' matrices.")
@click.option("--hard-weight", default=0.5, help="Weight of the target's first choice in the loss.")
@click.option("--bench-prompts", default=60, help="Prompts of each benchmark.")
@click.option("--bench-tokens", default=192, help="New tokens of a benchmark answer, at most.")
def draft(stage: str, *, target: str, device: str, **options: Any) -> None:
    """Distil a small draft model, for `--draft-model`, from what a target answers.

    STAGE is one step of this work, or `all`. Each stage reads what the earlier ones have written to --work and --out.
    """
    from specq.training.draft_settings import DraftSettings
    from specq.training.settings import choose_device

    place = choose_device(device, compiled=False)
    settings = DraftSettings(target=Path(resolve_model(target, "target")), device=place, **options)
    run_stages(stage, DRAFT_STAGES, settings)
