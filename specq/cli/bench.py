"""`specq bench`: specq and its rivals on the same prompts; strategies or draft shapes side by side; the broker alone."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import orjson

from specq.bench.contestants import NAMES, default_names
from specq.bench.machine import describe
from specq.bench.pairs import Pair, parse_pairs
from specq.bench.prompts import shipped
from specq.bench.report import table
from specq.bench.settings import Settings
from specq.runtime import columns

_COUNT = click.IntRange(1)
_COMPARED_AT = (0.0, 0.8)  # temperatures
Outcome = tuple[dict[str, Any], list[Any], list[str]]  # figures, rows of the table, what else is told


@click.command()
@click.option("--dataset", multiple=True, help="gsm8k, humaneval, or a JSONL file; may be repeated.  [default: both]")
@click.option("--numseqs", type=_COUNT, default=20, show_default=True, help="Prompts of each data set.")
@click.option("--output-len", type=_COUNT, default=128, show_default=True, help="Most tokens for each prompt.")
@click.option("--ignore-eos", is_flag=True, help="Always that many tokens, past the end of the text.")
@click.option("--k", type=_COUNT, default=5, show_default=True, help="Tokens that transformers' assistant drafts.")
@click.option("--concurrency", type=_COUNT, default=1, show_default=True, help="Sessions of specq in flight.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    multiple=True,
    help="0 is greedy; may be repeated with --compare-*.  [default: 0; with --compare-*: 0 and 0.8]",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all sampling.")
@click.option("--repeats", type=_COUNT, default=3, show_default=True, help="Interleaved repetitions of everything.")
@click.option("--drafters", type=_COUNT, default=1, show_default=True, help="Draft workers of specq.")
@click.option("--model", default="tiny", show_default=True, help="Target: bundled, or a directory.")
@click.option("--draft-model", default="tiny", show_default=True, help="Draft model: bundled, or a directory.")
@click.option("--keys", default="", help="Directory of CURVE keys (specq keys) for all of specq; none: no encryption.")
@click.option("--random-draft", is_flag=True, help="Also measure specq with a drafter of random weights.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Measure only this one; may be repeated.")
@click.option(
    "--compare-strategies", is_flag=True, help="Measure each strategy next to plain decoding and lookup alone."
)
@click.option(
    "--compare-shapes", is_flag=True, help="Measure each shape of drafts next to plain decoding and lookup alone."
)
@click.option(
    "--pair",
    multiple=True,
    metavar="NAME=TARGET,DRAFT",
    help="What --compare-* compare on; may be repeated; DRAFT may be weak, weak:NOISE or random.  [default: tiny and weak]",
)
@click.option("--roundtrip", is_flag=True, help="Measure what the broker adds to a round trip, and nothing else.")
@click.option(
    "--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="File for all figures, JSON."
)
def bench(
    dataset: tuple[str, ...],
    numseqs: int,
    only: tuple[str, ...],
    pair: tuple[str, ...],
    temperature: tuple[float, ...],
    out: Path | None,
    *,
    random_draft: bool,
    compare_strategies: bool,
    compare_shapes: bool,
    roundtrip: bool,
    **options: Any,
) -> None:
    """Measure transformers generate and assisted generation, and specq in one run: plain, by lookup alone, with drafters.

    plain is no speculation at all. lookup has no drafters; its verifier drafts what the text repeats. specq has drafters, and
    lookups where they have sent nothing.

    With --compare-strategies or --compare-shapes: specq alone, in many ways, against its own plain decoding and lookup.
    """
    comparison = _comparison(strategies=compare_strategies, shapes=compare_shapes, roundtrip=roundtrip)
    _refuse_idle(comparison, pair=pair, only=only, random_draft=random_draft, temperature=temperature)
    if out is None and not roundtrip:
        raise click.UsageError("--out FILE.json is missing")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that no process is left behind
    about = describe(shlex.join(["specq", *sys.argv[1:]]))
    settings = Settings(datasets=dataset or tuple(shipped()), num_prompts=numseqs, **options)
    if comparison == "roundtrip":
        result, rows, told = _roundtrip(settings)
    elif comparison:
        result, rows, told = _compare(comparison, parse_pairs(pair), temperature or _COMPARED_AT, settings)
    else:
        settings = replace(settings, temperature=temperature[0] if temperature else 0.0)
        result, rows, told = _bench(settings, only or default_names(settings, random_draft=random_draft))
    click.echo(columns(rows))
    for line in told:
        click.echo(line)
    if out is not None:
        out.write_bytes(orjson.dumps(about | result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _comparison(**asked: bool) -> str:
    """Return which of the special measurements is asked for, or ""; at most one may be."""
    wanted = [name for name, is_wanted in asked.items() if is_wanted]
    if len(wanted) > 1:
        raise click.UsageError("--compare-strategies, --compare-shapes and --roundtrip are runs of their own; give one")
    return wanted[0] if wanted else ""


def _refuse_idle(
    comparison: str, *, pair: Sequence[str], only: Sequence[str], random_draft: bool, temperature: Sequence[float]
) -> None:
    """Raise UsageError for options that would be ignored."""
    compares = comparison in ("strategies", "shapes")
    if pair and not compares:
        raise click.UsageError(
            "--pair goes with --compare-strategies or --compare-shapes; else give --model, --draft-model"
        )
    if compares and (only or random_draft):
        raise click.UsageError("--only and --random-draft do not go with --compare-*; name the pairs with --pair")
    if len(temperature) > 1 and not compares:
        raise click.UsageError("--temperature may be repeated only with --compare-strategies or --compare-shapes")


def _bench(settings: Settings, names: tuple[str, ...]) -> Outcome:
    from specq.bench.run import run

    result = run(settings, names, _tell)
    return result, table(result["contestants"]), _told(settings, result["agreement"])


def _compare(comparison: str, pairs: Sequence[Pair], temperatures: Sequence[float], settings: Settings) -> Outcome:
    from specq.bench import grid, variants

    ways = {"strategies": (variants.strategies, grid.strategy_table), "shapes": (variants.shapes, grid.shape_table)}
    list_variants, make_table = ways[comparison]
    result = grid.run_grid(pairs, list_variants(), temperatures, settings, _tell)
    told = (
        [f"in law: {grid.NOTES['in_distribution']}"]
        if any(cell["same_text"] is None for cell in result["cells"])
        else []
    )
    return {"comparison": comparison} | result, make_table(result["cells"]), told


def _roundtrip(settings: Settings) -> Outcome:
    from specq.bench.roundtrip import roundtrip, roundtrip_table, verdict_on

    result = roundtrip(repeats=settings.repeats, keys=settings.keys, tell=_tell)
    return result, roundtrip_table(result), verdict_on(result)


def _tell(text: str) -> None:
    click.echo(text, err=True)


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
