"""`specq bench`: specq and its rivals on the same prompts; or what the broker adds to a round trip."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click
import orjson

from specq.bench.contestants import NAMES, default_names
from specq.bench.machine import describe
from specq.bench.prompts import shipped
from specq.bench.report import table
from specq.bench.settings import Settings
from specq.cli.columns import columns

_COUNT = click.IntRange(1)


@click.command()
@click.option("--dataset", multiple=True, help="gsm8k, humaneval, or a JSONL file; may be repeated.  [default: both]")
@click.option("--numseqs", type=_COUNT, default=20, show_default=True, help="Prompts of each data set.")
@click.option("--output-len", type=_COUNT, default=128, show_default=True, help="Most tokens for each prompt.")
@click.option("--ignore-eos", is_flag=True, help="Always that many tokens, past the end of the text.")
@click.option("--k", type=_COUNT, default=5, show_default=True, help="Tokens that transformers' assistant drafts.")
@click.option("--concurrency", type=_COUNT, default=1, show_default=True, help="Sessions of specq in flight.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all sampling.")
@click.option("--repeats", type=_COUNT, default=3, show_default=True, help="Interleaved repetitions of everything.")
@click.option("--drafters", type=_COUNT, default=1, show_default=True, help="Draft workers of specq.")
@click.option("--model", default="tiny", show_default=True, help="Target: bundled, or a directory.")
@click.option("--draft-model", default="tiny", show_default=True, help="Draft model: bundled, or a directory.")
@click.option("--random-draft", is_flag=True, help="Also measure specq with a drafter of random weights.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Measure only this one; may be repeated.")
@click.option("--roundtrip", is_flag=True, help="Measure what the broker adds to a round trip, and nothing else.")
@click.option(
    "--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="File for all figures, JSON."
)
def bench(
    dataset: tuple[str, ...],
    numseqs: int,
    only: tuple[str, ...],
    out: Path | None,
    *,
    random_draft: bool,
    roundtrip: bool,
    **options: Any,
) -> None:
    """Measure transformers generate and assisted generation, and specq without and with drafters, in one run."""
    if out is None and not roundtrip:
        raise click.UsageError("--out FILE.json is missing")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that no process is left behind
    about = describe(shlex.join(["specq", *sys.argv[1:]]))
    if roundtrip:
        result, rows, told = _roundtrip(options["repeats"])
    else:
        settings = Settings(datasets=dataset or tuple(shipped()), num_prompts=numseqs, **options)
        result, rows, told = _bench(settings, only or default_names(settings, random_draft=random_draft))
    click.echo(columns(rows))
    for line in told:
        click.echo(line)
    if out is not None:
        out.write_bytes(orjson.dumps(about | result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _bench(settings: Settings, names: tuple[str, ...]) -> tuple[dict[str, Any], list[Any], list[str]]:
    from specq.bench.run import run

    result = run(settings, names, lambda text: click.echo(text, err=True))
    return result, table(result["contestants"]), _told(settings, result["agreement"])


def _roundtrip(repeats: int) -> tuple[dict[str, Any], list[Any], list[str]]:
    from specq.bench.roundtrip import roundtrip, roundtrip_table, verdict_on

    result = roundtrip(repeats=repeats, tell=lambda text: click.echo(text, err=True))
    return result, roundtrip_table(result), verdict_on(result)


def _told(settings: Settings, agreement: dict[str, Any]) -> list[str]:
    """Return what the table does not say."""
    same = f"{agreement['num_compared']} completions compared with {agreement['reference']}: "
    same += f"{agreement['num_different']} differ, {agreement['num_near_ties']} of them by a near tie"
    lines = [same]
    for one in agreement["differences"]:
        gap = "unknown" if one["gap"] is None else f"{one['gap']:.2g}"
        lines.append(f"  {one['contestant']} on {one['prompt']} from token {one['position']} on; gap of logits {gap}")
    if settings.concurrency > 1:
        lines.append("transformers ran one prompt after the other, plain-1 one session at a time")
    return lines
