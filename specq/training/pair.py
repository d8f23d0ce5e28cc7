"""The stages of `specq train pair`, each a function of the settings that prints its result."""

from __future__ import annotations

from pathlib import Path

import click

from specq.protocol import ConfigError
from specq.training import corpus, distil, pretrain, report, rollouts
from specq.training.settings import PairSettings


def train_tokenizer(settings: PairSettings) -> None:
    """Train the tokenizer on the corpus."""
    settings.work.mkdir(parents=True, exist_ok=True)
    tokenizer = corpus.train_tokenizer(settings.corpus, settings.limit)
    corpus.save_tokenizer(tokenizer, settings.tokenizer_folder)


def tokenize_corpus(settings: PairSettings) -> None:
    """Turn the corpus into token ids."""
    _require("tokenizer", settings.tokenizer_folder)
    tokenizer = corpus.load_tokenizer(settings.tokenizer_folder)
    built = corpus.build_dataset(settings.corpus, tokenizer, settings.limit)
    built.save(settings.dataset_file)
    click.echo(f"{len(built.token_ids)} tokens in {len(built.held_out)} documents")


def train_target(settings: PairSettings) -> None:
    """Train the target."""
    _require("data", settings.dataset_file)
    click.echo(f"target loss {pretrain.train_target(settings):.4f}")


def roll_out(settings: PairSettings) -> None:
    """Generate the target's answers to prompts of the corpus."""
    _require("target", settings.target_folder)
    click.echo(f"{rollouts.roll_out(settings)} new tokens")


def distil_draft(settings: PairSettings) -> None:
    """Distil the draft."""
    _require("rollouts", settings.rollouts_file)
    click.echo(f"draft loss {distil.distil_draft(settings):.4f}")


def evaluate(settings: PairSettings) -> None:
    """Measure losses and acceptance."""
    _require("draft", settings.draft_folder)
    report.evaluate_pair(settings)


def export(settings: PairSettings) -> None:
    """Copy both models to the export directory."""
    _require("draft", settings.draft_folder)
    report.export_pair(settings)


def _require(stage: str, path: Path) -> None:
    """Raise ConfigError unless an earlier stage has written the input of this one."""
    if not path.exists():
        raise ConfigError(f"there is no {path}; run the stage {stage!r} first, with the same --work")
