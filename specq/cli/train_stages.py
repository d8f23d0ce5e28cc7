"""Shared parts of the `specq train` commands: running stages of a table (one or all), and common options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from specq.cli.options import Seconds
from specq.models import resolve_model
from specq.protocol import ConfigError
from specq.runtime import Number, OutFile, OutFolder, resolve
from specq.samples import DATA as PROMPTS_HERE
from specq.training.records import (
    PROMPTS,
    ROLLOUTS,
    bench_paths,
    prompt_paths,
    read_questions,
    read_records,
    rollout_paths,
)

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # as click.option returns it

ALL_STAGES = "all"
MOST_SECONDS = 1e8
COUNT = click.IntRange(min=1)
SEED = click.IntRange(0, 2**32 - 1)
RATE = Number(0, 1, min_open=True)
SHARE = Number(0, 1)
OPEN_SHARE = Number(0, 1, min_open=True)
DURATION = Seconds(0, MOST_SECONDS, min_open=True)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)


def run_stages(stage: str, stages: Mapping[str, str], settings: object) -> None:
    """Run one stage, or all stages of the table in order with ALL_STAGES."""
    for name in stages if stage == ALL_STAGES else [stage]:
        click.echo(f"== {name}")
        resolve("stage", stages, name)(settings)


def checked(stage: str, stages: Mapping[str, str], target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with the target's path and the default prompts filled in.

    Raises ConfigError for files that the stage needs and that are missing. Does not import torch, which takes seconds.
    """
    path = Path(resolve_model(target, "target"))
    if not path.exists():
        raise ConfigError(f"{path} does not exist; --target must be a model on this machine")
    corpus, bench = options["corpus"] or PROMPTS_HERE, options["bench"] or PROMPTS_HERE
    names, folder = list(stages), options["work"] / ROLLOUTS
    is_first, is_last = stage in (ALL_STAGES, names[0]), stage in (ALL_STAGES, names[-1])
    if is_first:
        for file in prompt_paths(corpus):
            next(read_questions(file, 1), None)
    if options["rollouts"] or not (is_first or is_last):
        rollout_paths(folder, options["rollouts"])
    if is_last:
        for file in bench_paths(bench):
            next(read_records(file, PROMPTS, 1), None)
    return {**options, "target": path, "corpus": corpus, "bench": bench}


def run_method(
    stage: str, stages: Mapping[str, str], settings: str, target: str, device: str, options: Mapping[str, Any]
) -> None:
    """Check the options of a method, and run it with them; `settings`: its class in `specq.training.settings`."""
    found = checked(stage, stages, target, options)
    from specq.training import settings as known  # imports torch

    run_stages(stage, stages, getattr(known, settings)(**found, device=known.choose_device(device, compiled=False)))


def run_options(out: str, made: str) -> Callable[[F], F]:
    """Add the options of `specq.training.settings.RunSettings` with the same defaults for all methods.

    `out`: default output folder; `made`: start of its description, such as "the heads go".
    """
    options = [*_text_options(), *_place_options(out, made), *_rollout_options(), *_bench_options()]

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _text_options() -> list[Option]:
    """Return the options of the target and the training texts."""
    return [
        click.option(
            "--target",
            required=True,
            help="Target (Llama or Qwen2): a name from `specq models`, a directory, or a GGUF file.",
        ),
        click.option(
            "--corpus",
            type=click.Path(path_type=Path),
            default=None,
            show_default="bundled prompts",
            help="Prompts: a directory of *.jsonl.gz, *.jsonl or *.txt files, or one such file.",
        ),
        click.option(
            "--bench",
            type=_FOLDER,
            default=None,
            show_default="other bundled prompts",
            help="Directory of *.jsonl prompts for the stage `evaluate`. If equal to --corpus, `evaluate` uses every "
            "fourth prompt and `rollouts` the rest.",
        ),
    ]


def _place_options(out: str, made: str) -> list[Option]:
    return [
        click.option("--work", type=OutFolder(), default=".train", help="Directory for rollouts and the report."),
        click.option("--out", type=OutFolder(), default=out, help=f"Directory where {made}."),
        click.option("--results", type=OutFile(makes_directory=True), default=None, help="Second file for the report."),
    ]


def _rollout_options() -> list[Option]:
    return [
        click.option(
            "--rollouts",
            type=_FILE,
            multiple=True,
            show_default=False,
            help="Also train on this .npz file. Repeatable.",
        ),
        click.option("--device", default="", show_default=False, help="torch device.  [default: a GPU if present]"),
        click.option("--seed", type=SEED, default=17, help="Seed of all random numbers."),
        click.option(
            "--limit", type=COUNT, default=None, help="Maximum number of records to read per shard.  [default: all]"
        ),
        click.option(
            "--rollout-seconds",
            type=Seconds(0, MOST_SECONDS),
            default=600.0,
            help="Time limit for the target's answers, in seconds; finished answers count.",
        ),
        click.option(
            "--rollout-rows", type=COUNT, default=2048, help="Maximum number of prompts per batch of rollouts."
        ),
        click.option("--rollout-tokens", type=COUNT, default=256, help="Maximum number of new tokens per rollout."),
    ]


def _bench_options() -> list[Option]:
    return [
        click.option("--hard-weight", type=SHARE, default=0.5, help="Weight of the target's first choice in the loss."),
        click.option("--bench-prompts", type=COUNT, default=60, help="Number of prompts per benchmark."),
        click.option(
            "--bench-tokens", type=COUNT, default=192, help="Maximum number of new tokens per benchmark answer."
        ),
    ]
