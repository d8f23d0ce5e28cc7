"""`specq bench methods`: every way to draft side by side, on one target."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.deployments import Deployments
from bench.method_figures import NOTES, cells_of, dataset_table, figures_of, method_table, ratio_text, to_best
from bench.method_turns import measure_methods, portions
from bench.methods import KINDS, SHARED_TOKENS, DraftFiles, choose
from bench.report import Report, show, tell
from bench.settings import Settings
from bench.suite import COUNT, suite
from specq.models import SHOWN_PAIR, default_pair, draft_for, parallel_for
from specq.runtime import Number
from specq.samples import DATA, codec_of, files_of, load_prompts, shipped

TEMPERATURES = (0.0, 0.8)
READY_S = 600.0  # of each method's processes: draft workers run only where nothing else does, so they begin late beside other work
MOST_PORTIONS = 8  # times as many prompts as are needed: what is left of them is for warming up


@suite("methods")
@click.option("--target", default=default_pair, show_default=SHOWN_PAIR, help="A name, or a path.")
@click.option(
    "--draft", metavar="DIR", help="An autoregressive draft model.  [default: the one that comes with the target]"
)
@click.option("--heads", metavar="DIR", multiple=True, help="Medusa heads, or an EAGLE-3 head; may be repeated.")
@click.option(
    "--parallel",
    metavar="DIR",
    help="A draft model that foresees several tokens in one pass.  [default: the one that comes with the target, if any]",
)
@click.option(
    "--methods", "kinds", multiple=True, type=click.Choice(list(KINDS)),
    help="Beside plain; may be repeated.  [default: all that there are files for]",
)  # fmt: skip
@click.option(
    "--bench",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of JSONL files, each a data set.  [default: GSM8K, HumanEval and MT-bench, which come along]",
)
@click.option("--sessions", type=COUNT, default=1, show_default=True, help="In flight.")
@click.option("--limit", type=COUNT, default=5, show_default=True, help="Prompts of each data set in each repetition.")
@click.option("--max-tokens", type=COUNT, default=64, show_default=True, help="Tokens of each text at most.")
@click.option(
    "--repeats", type=COUNT, default=3, show_default=True, help="Interleaved repetitions, each of other prompts."
)
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=Number(0),
    default=TEMPERATURES,
    show_default=True,
    help="May be repeated.",
)
@click.option(
    "--settle-s", type=Number(0), default=20.0, show_default=True,
    help="Seconds in which `everything` learns at each temperature which drafts pay.",
)  # fmt: skip
@click.option(
    "--shared-tokens", type=COUNT, default=SHARED_TOKENS, show_default=True,
    help="Tokens of ended jobs from which `suffix` drafts.",
)  # fmt: skip
def command(
    report: Report,
    *,
    target: str,
    draft: str | None,
    heads: tuple[str, ...],
    parallel: str | None,
    kinds: tuple[str, ...],
    bench: Path | None,
    temperatures: tuple[float, ...],
    settle_s: float,
    shared_tokens: int,
    **given: Any,
) -> None:
    """Serve the same prompts by every way to draft, each in processes of its own, in turns; compare speed, acceptance and texts.

    Drafts are always used, and of one source at a time, so that the method is measured; `everything` has all sources at once and uses those
    that it measures to pay. Each text must be plain decoding's, at every temperature: the exit status is 1 if one is not.
    """
    draft = draft_for(target) if draft is None else draft
    parallel = parallel_for(target) if parallel is None else parallel
    files = DraftFiles(draft, parallel, heads, shared_tokens)
    methods = choose(files, kinds)
    settings = _settings(target, bench, **given)
    least = settings.repeats + 1  # one for each repetition, and one for warming up
    prompts = load_prompts(settings.datasets, MOST_PORTIONS * least * settings.num_prompts, codec_of(target))
    first, *others = portions(prompts, settings.num_prompts, least)
    of_repeats, warming = others[: settings.repeats], [first, *others[settings.repeats :]]
    asked = {"target": target, "draft": draft, "heads": heads, "parallel": parallel, "settle_s": settle_s}
    report.update(
        settings=asked
        | given
        | {"datasets": [Path(one).stem for one in settings.datasets], "methods": [one.name for one in methods]}
    )
    results, notes = report.content["results"], list(NOTES)
    with Deployments(READY_S) as deployments:
        for temperature in dict.fromkeys(temperatures):
            at = f"T={temperature:g}"
            now = replace(settings, temperature=temperature)
            measured = measure_methods(methods, now, warming, of_repeats, settle_s, deployments, tell)
            found: dict[str, Any] = {"methods": cells_of(methods, measured, settings.concurrency)}
            if best := to_best(measured.turns, methods):
                found["everything_to_best"] = {"best": best[0], "ratio": best[1]}
                notes.append(f"{at}: everything at once to the best single method, {best[0]}: {ratio_text(best[1])}")
            report.update(figures=figures_of(at, found["methods"]), results={at: found})
    show(method_table(results), ["", *notes, ""])
    show(dataset_table(results), ["tokens a round, and the ratio of tokens/s to plain decoding"])
    sys.exit(any(cell["differing"] for found in results.values() for cell in found["methods"].values()))


def _settings(target: str, bench: Path | None, *, sessions: int, limit: int, max_tokens: int, repeats: int) -> Settings:
    """Return the settings of a run; raises ConfigError for a directory without data sets."""
    return Settings(
        datasets=(*shipped(), *files_of(DATA / "chat")) if bench is None else files_of(bench),
        num_prompts=limit,
        output_len=max_tokens,
        concurrency=sessions,
        repeats=repeats,
        model=target,
    )
