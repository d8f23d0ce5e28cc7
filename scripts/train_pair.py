"""Train the bundled pair of small models: a target of 9.7 million parameters and a draft distilled from it.

Stages, each a sub-command that reads and writes files in the work directory: tokenizer, data, target, rollouts, draft,
evaluate, export; `all` runs them in this order. Example (a few minutes on one H100 or H200):

    python scripts/train_pair.py --corpus CORPUS --bench BENCH --work .train all
"""

from collections.abc import Callable
from pathlib import Path

import click
import torch
from train_pair_lib import distil, pretrain, report, rollouts
from train_pair_lib.dataset import build_dataset
from train_pair_lib.settings import Settings
from train_pair_lib.vocabulary import load_tokenizer, save_tokenizer, train_tokenizer


def run_tokenizer(settings: Settings) -> None:
    """Train the tokenizer on the corpus."""
    settings.work.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(settings.corpus, settings.limit), settings.tokenizer_folder)


def run_data(settings: Settings) -> None:
    """Tokenise the corpus."""
    dataset = build_dataset(settings.corpus, load_tokenizer(settings.tokenizer_folder), settings.limit)
    dataset.save(settings.dataset_file)
    print(f"{len(dataset.token_ids)} tokens in {len(dataset.held_out)} documents")


def run_target(settings: Settings) -> None:
    """Train the target."""
    print(f"target loss {pretrain.train_target(settings):.4f}")


def run_rollouts(settings: Settings) -> None:
    """Let the target answer corpus prompts."""
    print(f"{rollouts.roll_out(settings)} new tokens")


def run_draft(settings: Settings) -> None:
    """Distil the draft."""
    print(f"draft loss {distil.distil_draft(settings):.4f}")


def run_evaluate(settings: Settings) -> None:
    """Measure losses and acceptance."""
    report.evaluate_pair(settings)


def run_export(settings: Settings) -> None:
    """Copy both models to the export directory."""
    report.export_pair(settings)


STAGES: dict[str, Callable[[Settings], None]] = {
    "tokenizer": run_tokenizer,
    "data": run_data,
    "target": run_target,
    "rollouts": run_rollouts,
    "draft": run_draft,
    "evaluate": run_evaluate,
    "export": run_export,
}

FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group(context_settings={"show_default": True})
@click.option("--corpus", type=FOLDER, default="corpus", help="Directory of *.jsonl.gz shards.")
@click.option("--bench", type=FOLDER, default="bench", help="Directory of *.jsonl prompts, read by `evaluate` only.")
@click.option("--work", type=FOLDER, default=".train", help="Directory for what the stages hand on.")
@click.option("--out", type=FOLDER, default="specq/models/tiny", help="Where `export` puts target/ and draft/.")
@click.option("--results", type=click.Path(path_type=Path), default=None, help="A second place for the report.")
@click.option("--device", default=None, help="torch device; a GPU if there is one.")
@click.option("--compile/--no-compile", "compiled", default=False, help="Use torch.compile.")
@click.option("--seed", default=17, help="Seed of everything.")
@click.option("--limit", type=int, default=None, help="Read only so many records a shard.")
@click.option("--steps", type=int, default=None, help="Set both numbers of steps at once, for a trial.")
@click.option("--target-steps", default=2000, help="Optimizer steps of the target.")
@click.option("--draft-steps", default=4000, help="Optimizer steps of the draft.")
@click.option("--row-length", default=1024, help="Tokens in a packed row.")
@click.option("--batch-tokens", default=65536, help="Tokens in a batch.")
@click.option("--target-lr", default=4e-3, help="Peak learning rate of the target.")
@click.option("--draft-lr", default=4e-3, help="Peak learning rate of the draft.")
@click.option("--weight-decay", default=0.8, help="Decoupled weight decay of the target's matrices.")
@click.option("--closing-share", default=0.35, help="Share of the steps in which the target's rate falls.")
@click.option("--draft-shape", type=click.Choice(["draft-1", "draft-2"]), default="draft-2", help="1 or 2 layers.")
@click.option("--hard-weight", default=0.3, help="Weight of the target's first choice in the draft's loss.")
@click.option("--num-rollouts", default=110000, help="Prompts that the target answers for distillation.")
@click.option("--rollout-tokens", default=192, help="New tokens of a rollout, at most.")
@click.option("--bench-prompts", default=100, help="Prompts of each benchmark.")
@click.option("--bench-tokens", default=128, help="New tokens of a benchmark answer, at most.")
@click.pass_context
def main(context: click.Context, steps: int | None, device: str | None, **options: object) -> None:
    """Train, distil, evaluate and export the bundled pair."""
    if steps is not None:
        options.update(target_steps=steps, draft_steps=steps)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if options["compiled"]:
        # Three row lengths, two models, with and without gradients.
        torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - it has no public name
    context.obj = Settings(device=torch.device(chosen), **options)


@main.command(name="all")
@click.pass_obj
def run_all(settings: Settings) -> None:
    """Run every stage in order."""
    for name, stage in STAGES.items():
        print(f"== {name}")
        stage(settings)


def _add_stage(name: str, stage: Callable[[Settings], None]) -> None:
    """Make a stage a sub-command."""
    main.command(name=name, help=stage.__doc__)(click.pass_obj(stage))


for _name, _stage in STAGES.items():
    _add_stage(_name, _stage)

if __name__ == "__main__":
    main()
