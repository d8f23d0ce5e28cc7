"""`specq bench pair`: specq and its rivals on the same prompts and the same pair of models."""

from __future__ import annotations

from typing import Any

import click

from bench.contestants import NAMES, default_names
from bench.figures import table
from bench.report import Report, figure, show, tell
from bench.run import run
from bench.settings import Settings
from bench.suite import COUNT, serving_options, suite
from specq.models import SHOWN_PAIR, default_pair
from specq.runtime import Number
from specq.samples import shipped


@suite("pair")
@serving_options
@click.option("--k", type=COUNT, default=5, show_default=True, help="Tokens that transformers' assistant drafts.")
@click.option("--temperature", type=Number(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--model", default=default_pair, show_default=SHOWN_PAIR, help="Target: a name, or a path.")
@click.option("--draft-model", default=default_pair, show_default=SHOWN_PAIR, help="Draft model, likewise.")
@click.option("--random-draft", is_flag=True, help="Also measure specq with a drafter of random weights.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Measure only this one; may be repeated.")
def command(
    report: Report,
    *,
    dataset: tuple[str, ...],
    numseqs: int,
    only: tuple[str, ...],
    random_draft: bool,
    **options: Any,
) -> None:
    """Measure transformers generate and assisted generation, and specq in one run: plain, by lookup alone, with drafters.

    plain is no speculation at all. lookup has no drafters; its verifier drafts what the text repeats. specq has drafters, and
    lookups where they have sent nothing.
    """
    settings = Settings(datasets=dataset or tuple(shipped()), num_prompts=numseqs, **options)
    result = run(settings, only or default_names(settings, random_draft=random_draft), tell)
    rates = {
        f"{name} tokens/s": figure("tokens/s", own["tokens_per_second"]["repeats"])
        for name, own in result["contestants"].items()
    }
    report.update(settings=result.pop("settings"), figures=rates, results=result)
    show(table(result["contestants"]), _notes(settings, result["agreement"]))


def _notes(settings: Settings, agreement: dict[str, Any]) -> list[str]:
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
