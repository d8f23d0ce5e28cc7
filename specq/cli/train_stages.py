"""What the commands of `specq train` share: they run one stage of a table, or all in order; and the options of those
that train a drafter for a target that exists."""

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
    """Run a stage, or with ALL_STAGES each of the table, with these settings."""
    for name in stages if stage == ALL_STAGES else [stage]:
        click.echo(f"== {name}")
        resolve("stage", stages, name)(settings)


def checked(stage: str, stages: Mapping[str, str], target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of such a method, with the prompts that come with specq where none are named, and the target's
    path; ConfigError for what the stage would not find there. It imports no torch, which takes seconds."""
    path = Path(resolve_model(target, "target"))
    if not path.exists():
        raise ConfigError(f"there is no {path}; drafters are trained for a model that lies on this machine")
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


def run_options(out: str, made: str) -> Callable[[F], F]:
    """Add the options of `specq.training.settings.RunSettings` whose defaults are the same for all methods;
    `made`, into the folder `out`: what such a method makes."""
    options = [*_text_options(), *_place_options(out, made), *_rollout_options(), *_bench_options()]

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _text_options() -> list[Option]:
    """Return the options that say what is trained for, and on which texts."""
    return [
        click.option(
            "--target", required=True, help="A name of `specq models`, a directory, or a GGUF file; Llama or Qwen2."
        ),
        click.option(
            "--corpus",
            type=click.Path(path_type=Path),
            default=None,
            show_default="prompts that come with specq",
            help="Prompts: a directory of *.jsonl.gz, *.jsonl or *.txt files, or one such file.",
        ),
        click.option(
            "--bench",
            type=_FOLDER,
            default=None,
            show_default="others that come with specq",
            help="Directory of *.jsonl prompts for `evaluate`; where it is that of --corpus, too, every fourth of "
            "them, and `rollouts` takes the rest.",
        ),
    ]


def _place_options(out: str, made: str) -> list[Option]:
    return [
        click.option("--work", type=OutFolder(), default=".train", help="Directory for rollouts and the report."),
        click.option("--out", type=OutFolder(), default=out, help=f"Where {made}."),
        click.option(
            "--results", type=OutFile(makes_directory=True), default=None, help="A second place for the report."
        ),
    ]


def _rollout_options() -> list[Option]:
    return [
        click.option(
            "--rollouts",
            type=_FILE,
            multiple=True,
            show_default=False,
            help="Also learn from this .npz file; repeatable.",
        ),
        click.option("--device", default="", help="torch device; a GPU if there is one."),
        click.option("--seed", type=SEED, default=17, help="Seed of everything."),
        click.option("--limit", type=COUNT, default=None, help="Most records to read of each shard."),
        click.option(
            "--rollout-seconds",
            type=Seconds(0, MOST_SECONDS),
            default=600.0,
            help="How long the target answers; what is there then counts.",
        ),
        click.option("--rollout-rows", type=COUNT, default=2048, help="Prompts in a batch of rollouts, at most."),
        click.option("--rollout-tokens", type=COUNT, default=256, help="New tokens of a rollout, at most."),
    ]


def _bench_options() -> list[Option]:
    return [
        click.option("--hard-weight", type=SHARE, default=0.5, help="Weight of the target's first choice in the loss."),
        click.option("--bench-prompts", type=COUNT, default=60, help="Prompts of each benchmark."),
        click.option("--bench-tokens", type=COUNT, default=192, help="New tokens of a benchmark answer, at most."),
    ]
