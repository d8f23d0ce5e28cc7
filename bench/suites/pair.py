"""`specq bench pair`: specq and its rivals on the same prompts and the same pair of models.

transformers   transformers `generate`.
assisted       transformers' assisted generation.
plain          specq without any speculation: no drafters, and no lookups by the verifier.
plain-1        the same, one session at a time (if more are requested).
lookup         specq without drafters, whose verifier drafts what the text repeats. On the processes of `plain`.
lookahead      specq without drafters, whose verifier always drafts by lookahead decoding alone (if requested).
specq          specq with drafters, and lookups where they have sent no drafts.
random         specq with a drafter of random weights (if requested).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench import agreement
from bench.accuracy import Shares, check_references, share_right
from bench.deployments import NO_DRAFTS, Deployments, Specq, Starter, deployment, starter
from bench.figures import by_dataset, can_draw, dataset_figures, dataset_table, draw, figures, table
from bench.report import Report, figure, show, tell
from bench.scenario import Settings
from bench.suite import COUNT, option, repeatable, serving_options, suite
from bench.tracking import tracked
from bench.turns import Contestant, blocks_of, measure, warm_up
from specq.models import SHOWN_PAIR, default_pair
from specq.runtime import Number, Tell
from specq.samples import shipped, shipped_and_chats

if TYPE_CHECKING:
    from bench.rivals.transformers import Rivals

RIVALS = ("transformers", "assisted")
# The processes of each of specq's contestants; "alone" and "lookahead" have no drafters.
KINDS = {
    "plain-1": "alone", "plain": "alone", "lookup": "alone", "lookahead": "lookahead", "specq": "specq",
    "random": "random",
}  # fmt: skip
NAMES = (*RIVALS, *KINDS)
NOTES = {
    "transformers": "one prompt after the other, with as many threads as are fastest; specq's processes are idle "
    "meanwhile",
    "assisted": "the same, with the draft model as assistant",
    "plain": "specq without any speculation: no drafters, no lookups",
    "lookup": "specq without drafters; the verifier drafts what the text repeats",
    "lookahead": "specq without drafters; the verifier always drafts by lookahead decoding",
    "specq": "specq with drafters; the verifier drafts what the text repeats where they have sent nothing",
    "rate": "all tokens over all seconds of a repetition, prompts included; the median of the repetitions",
}


@suite("pair")
@serving_options
@option("--k", COUNT, 5, "Tokens that transformers' assistant drafts a round.")
@option("--temperature", Number(0), 0.0, "Sampling temperature. 0 is greedy.")
@option("--model", str, default_pair, "Target: a name, or a path.", show_default=SHOWN_PAIR)
@option("--draft-model", str, default_pair, "Draft model: a name, or a path.", show_default=SHOWN_PAIR)
@click.option("--random-draft", is_flag=True, help="Also measure specq with a drafter of random weights.")
@repeatable("--only", click.Choice(NAMES), (), "Measure only this contestant.", show_default=False)
@click.option(
    "--accuracy", is_flag=True, help="Count right answers. Runs HumanEval's answers in a process with limits."
)
@click.option(
    "--all", "every", is_flag=True, help="Add MT-bench. With --out, also plot each data set beside the report."
)
@click.option("--wandb", is_flag=True, help="Log the report to Weights & Biases.")
@option("--group", str, "", "Group of the run at Weights & Biases.")
def command(
    report: Report, *, dataset: tuple[str, ...], numseqs: int, only: tuple[str, ...], random_draft: bool, every: bool,
    accuracy: bool, wandb: bool, group: str, **options: Any,
) -> None:  # fmt: skip
    """Measure transformers generate and assisted generation, and specq in one run: plain, lookup alone, with drafters.

    plain: no speculation at all. lookup: no drafters; the verifier drafts what the text repeats. specq: drafters, and
    lookups where they have sent no drafts.
    """
    if group and not wandb:
        raise click.UsageError("--group is of runs at Weights & Biases; give --wandb, too")
    datasets = tuple(dict.fromkeys([*shipped_and_chats(), *dataset])) if every else dataset or tuple(shipped())
    settings = Settings(datasets=datasets, num_prompts=numseqs, **options)
    report.content["settings"].update(asdict(settings))
    beside = report.out if every and report.out and can_draw() else None
    tracking: AbstractContextManager[list[Path]] = tracked(report, group) if wandb else nullcontext([])
    with tracking as plots:
        names = only or default_names(settings, random_draft=random_draft)
        result = run(settings, names, tell, has_accuracy=accuracy, is_apart=every)
        found = result["contestants"]
        rates = {
            f"{name} tokens/s": figure("tokens/s", own["tokens_per_second"]["repeats"]) for name, own in found.items()
        }
        measured = by_dataset(found, result["right"]) if every or accuracy else {}
        rates |= dataset_figures(measured)
        report.update(settings=result.pop("settings"), figures=rates, results=result)
        show(table(found), _notes(settings, result["agreement"]))
        if measured:
            show(dataset_table(measured, found), [_equal(result["right"])] if accuracy else [])
        if beside:
            plots.extend(draw(measured, beside))


def default_names(settings: Settings, *, random_draft: bool) -> tuple[str, ...]:
    """Return the default contestants."""
    asked = {"plain-1": settings.concurrency > 1, "random": random_draft, "lookahead": False}
    return tuple(name for name in NAMES if asked.get(name, True))


def run(
    settings: Settings, names: Sequence[str], tell: Tell, *, has_accuracy: bool = False, is_apart: bool = False
) -> dict[str, Any]:
    """Measure the named contestants; return settings, figures and differences as JSON-able values.

    has_accuracy  whether to count right answers.
    is_apart      whether data sets run one after the other, also with several sessions in flight.
    """
    prompts = settings.prompts()
    if has_accuracy:
        check_references(prompts)
    portions = [list(own) for _, own in groupby(prompts, lambda prompt: prompt.dataset if is_apart else "")]
    with Deployments() as deployments:
        tell("starting specq's processes")
        running = deployments.serve({kind: _starter(kind, settings) for kind in kinds(names)})
        rivals = _load_rivals(names, settings, tell)
        everybody = [
            Specq(name, running[KINDS[name]].client, int(name == "plain-1"), NO_DRAFTS if "plain" in name else None)
            if name in KINDS
            else _rival(rivals, name)
            for name in NAMES
            if name in names
        ]
        warm_up(everybody, prompts, settings, tell)
        planned = [block for own in portions for block in blocks_of([own] * settings.repeats, settings.concurrency)]
        turns = measure(everybody, planned, settings, tell)
        sessions = {one.name: one.concurrency or settings.concurrency for one in everybody}
        comparable = [turn for turn in turns if settings.temperature == 0 or turn.contestant not in RIVALS]
        different = agreement.differences(comparable, rivals.logit_gap if rivals else None)
    return {
        "settings": asdict(settings) | {"transformers_threads": rivals.num_threads if rivals else None},
        "num_prompts": len(prompts),
        "contestants": figures(turns, sessions),
        "right": share_right(turns, settings.codec().decode) if has_accuracy else {},
        "agreement": agreement.summary(comparable, different),
        "notes": NOTES,
    }


def kinds(names: Sequence[str]) -> list[str]:
    """Return the needed sets of processes, in the order of NAMES."""
    return list(dict.fromkeys(KINDS[name] for name in NAMES if name in names and name in KINDS))


def _starter(kind: str, settings: Settings) -> Starter:
    drafters = settings.drafters if kind in ("specq", "random") else 0
    own = {"lookahead": True, "prompt_lookup": "none", "drafts": "always"} if kind == "lookahead" else {}
    return starter(
        lambda draft: deployment(settings.model, draft, drafters, keys=settings.keys, has_journal=True, **own),
        "random" if kind == "random" else settings.draft_model,
        settings.draft_model,
    )


def _load_rivals(names: Sequence[str], settings: Settings, tell: Tell) -> Rivals | None:
    if not set(RIVALS) & set(names):
        return None
    tell("loading the pair into transformers")
    from bench.rivals.transformers import Rivals

    return Rivals(settings.model, settings.draft_model)


def _rival(rivals: Rivals | None, name: str) -> Contestant:
    from bench.rivals.transformers import Transformers

    assert rivals is not None, "they are loaded for whoever needs them"
    return Transformers(rivals, name, assisted=name == "assisted")


def _equal(right: Shares) -> str:
    """Return whether specq has the same share of right answers with drafts as without."""
    differing = [
        dataset
        for dataset, found in right.items()
        if len({share for name, shares in found.items() if name in KINDS for share in shares}) > 1
    ]
    same = "as many right answers with drafts as without"
    return f"NOT {same}: {', '.join(differing)}" if differing else same


def _notes(settings: Settings, agreement: dict[str, Any]) -> list[str]:
    """Return notes that complete the table."""
    same = f"{agreement['num_compared']} completions compared with {agreement['reference']}: "
    same += f"{agreement['num_different']} differ, {agreement['num_near_ties']} of them by a near tie"
    lines = [same]
    for one in agreement["differences"]:
        gap = "unknown" if one["gap"] is None else f"{one['gap']:.2g}"
        lines.append(f"  {one['contestant']} on {one['prompt']} from token {one['position']} on; gap of logits {gap}")
    if settings.concurrency > 1:
        lines.append("transformers ran one prompt after the other, plain-1 one session at a time")
    return lines
