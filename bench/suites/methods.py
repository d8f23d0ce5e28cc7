"""`specq bench methods`: every way to draft side by side, on one target, each on processes of its own.

Rules: no prompt that counts comes twice to a verifier, so that none is found in its KV memory (of which an EAGLE-3
head has no hidden states) and no text is drafted from an earlier copy of itself. So each repetition has prompts of its
own, all others are for warming up (what a method learns of few texts says little of others), and for each temperature
processes start anew. All processes of a temperature run at a time; whoever is not asked waits without work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

import click

from bench.contestants import Specq
from bench.deployments import Deployments, starter
from bench.method_figures import (
    NOTES,
    MeasuredMethod,
    cells_of,
    dataset_table,
    figures_of,
    method_table,
    ratio_text,
    to_best,
)
from bench.methods import KINDS, SHARED_TOKENS, DraftFiles, ServedMethod, choose, config_of
from bench.report import Report, show, tell
from bench.scenario import Settings
from bench.step_split import StepSplit
from bench.suite import COUNT, option, repeatable, suite
from bench.turns import blocks_of, measure
from specq.models import SHOWN_PAIR, default_pair, draft_for, parallel_for
from specq.processes.servers import Servers
from specq.protocol import ConfigError
from specq.runtime import Number, Tell
from specq.samples import Prompt, files_of, shipped_and_chats

# of each method's processes: draft workers run only where nothing else does, so they begin late beside other work
READY_S = 600.0
MOST_PORTIONS = 8  # times as many prompts as are needed: what is left of them is for warming up
WITH_TARGET = "the one that comes with the target"
Portion = Sequence[Prompt]


@suite("methods")
@option("--target", str, default_pair, "A name, or a path.", show_default=SHOWN_PAIR)
@option("--draft", str, None, "An autoregressive draft model.", metavar="DIR", show_default=WITH_TARGET)
@repeatable("--heads", str, (), "Medusa heads, or an EAGLE-3 head.", metavar="DIR", show_default=False)
@option(
    "--parallel",
    str,
    None,
    "A draft model that foresees several tokens in one pass.",
    metavar="DIR",
    show_default=WITH_TARGET,
)
@repeatable(
    "--methods kinds", click.Choice(list(KINDS)), (), "Beside plain.", show_default="all that there are files for"
)
@option(
    "--bench",
    click.Path(exists=True, file_okay=False, path_type=Path),
    None,
    "Directory of JSONL files, each a data set.",
    show_default="GSM8K, HumanEval and MT-bench, which come along",
)
@option("--sessions", COUNT, 1, "In flight.")
@option("--limit", COUNT, 5, "Prompts of each data set in each repetition.")
@option("--max-tokens", COUNT, 64, "Tokens of each text at most.")
@option("--repeats", COUNT, 3, "Interleaved repetitions, each of other prompts.")
@repeatable("--temperature temperatures", Number(0), (0.0, 0.8), "")
@option("--settle-s", Number(0), 20.0, "Seconds in which `everything` learns at each temperature which drafts pay.")
@option("--shared-tokens", COUNT, SHARED_TOKENS, "Tokens of ended jobs from which `suffix` drafts.")
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
    """Serve the same prompts by every way to draft, each in processes of its own, in turns; compare speed, acceptance
    and texts.

    Drafts are always used, and of one source at a time, so that the method is measured; `everything` has all sources
    at once and uses those that it measures to pay. Each text must be plain decoding's, at every temperature: the exit
    status is 1 if one is not.
    """
    draft = draft_for(target) if draft is None else draft
    parallel = parallel_for(target) if parallel is None else parallel
    files = DraftFiles(draft, parallel, heads, shared_tokens)
    methods = choose(files, kinds)
    settings = _settings(target, bench, **given)
    least = settings.repeats + 1  # one for each repetition, and one for warming up
    prompts = replace(settings, num_prompts=MOST_PORTIONS * least * settings.num_prompts).prompts()
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
            if best := to_best(measured.turns):
                found["everything_to_best"] = {"best": best[0], "ratio": best[1]}
                notes.append(f"{at}: everything at once to the best single method, {best[0]}: {ratio_text(best[1])}")
            report.update(figures=figures_of(at, found["methods"]), results={at: found})
    show(method_table(results), ["", *notes, ""])
    show(dataset_table(results), ["tokens a round, and the ratio of tokens/s to plain decoding"])
    sys.exit(any(cell["differing"] for found in results.values() for cell in found["methods"].values()))


def _settings(target: str, bench: Path | None, *, sessions: int, limit: int, max_tokens: int, repeats: int) -> Settings:
    """Return the settings of a run; raises ConfigError for a directory without data sets."""
    return Settings(
        datasets=shipped_and_chats() if bench is None else files_of(bench),
        num_prompts=limit,
        output_len=max_tokens,
        concurrency=sessions,
        repeats=repeats,
        model=target,
    )


def portions(prompts: Sequence[Prompt], limit: int, least: int) -> list[list[Prompt]]:
    """Return lists of prompts with `limit` of each data set, none twice, as many as there are; raises ConfigError for
    a data set with fewer than `least` lists need."""
    groups = {dataset: list(group) for dataset, group in groupby(prompts, key=lambda prompt: prompt.dataset)}
    for dataset, own in groups.items():
        if len(own) < least * limit:
            raise ConfigError(
                f"{dataset} has {len(own)} prompts; {limit} for each repetition and for warming up are "
                f"{least * limit}: lower --limit or --repeats"
            )
    found: list[list[Prompt]] = [[] for _ in range(min(map(len, groups.values())) // limit)]
    for own in groups.values():
        for i, portion in enumerate(found):
            portion.extend(own[i * limit : (i + 1) * limit])
    return found


def measure_methods(
    methods: Sequence[ServedMethod], settings: Settings, warming: Sequence[Portion], prompts: Sequence[Portion],
    settle_s: float,
    deployments: Deployments, tell: Tell,
) -> MeasuredMethod:  # fmt: skip
    """Start all methods, warm them up, and let them take turns on `prompts`: a list for each repetition. `warming`:
    lists of other prompts.

    settle_s   seconds of service, at least, in which a method that measures which drafts pay learns that
    """
    names = {f"{method.name} T={settings.temperature:g}": method for method in methods}
    tell(f"starting {', '.join(names)}")
    running = deployments.serve(
        {name: starter(partial(_config, method, settings.model)) for name, method in names.items()}
    )
    everybody = [_contestant(method, running[name]) for name, method in names.items()]
    splits = {}
    for (name, method), contestant in zip(names.items(), everybody, strict=True):
        _settle(contestant, warming, settings, settle_s if method.is_measured else 0.0, tell)
        splits[method.name] = StepSplit(contestant.client, running[name].config.broker.heartbeat_ms)
        splits[method.name].begin()
    turns = measure(everybody, blocks_of(prompts, settings.concurrency), settings, tell)
    worker_s = {
        one.name: float(sum(one.cpu_s.values()))
        for one, method in zip(everybody, methods, strict=True)
        if method.worker
    }
    return MeasuredMethod(turns, {name: split.figures() for name, split in splits.items()}, worker_s)


def _config(method: ServedMethod, target: str, _draft: str) -> Any:
    return config_of(method, target)


def _contestant(method: ServedMethod, servers: Servers) -> Specq:
    workers = {name: pid for name, pid in servers.pids().items() if name.startswith("draft")}
    return Specq(method.name, servers.client, options={"mode": method.mode, "tenant": ""}, pids=workers)


def _settle(contestant: Specq, warming: Sequence[Portion], settings: Settings, seconds: float, tell: Tell) -> None:
    """Complete the first of these lists; all, again and again, for so long where it is to be learned which drafts pay.
    What ended jobs of other tenants said is not drafted from."""
    tell(f"warming up {contestant.name}")
    contestant.run(warming[0], settings)
    end = time.perf_counter() + seconds
    for number in count(1):
        if time.perf_counter() >= end:
            break
        contestant.options["tenant"] = f"settling {number // len(warming)}" if number >= len(warming) else ""
        contestant.run(warming[number % len(warming)], settings)
    contestant.options["tenant"] = ""
    contestant.cpu_s.clear()
