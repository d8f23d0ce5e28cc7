"""`specq bench methods`: every way to draft side by side, on one target, each on processes of its own.

Rules: no measured prompt repeats on a verifier. So none is found in its KV cache, for which an EAGLE-3 head has no
hidden states. No text is drafted from an earlier copy of itself. So each repetition has its own prompts, and all others
are for warm-up, because results from few texts do not carry over to others. For each temperature the processes start
again. All processes of a temperature run at the same time, and idle contestants do no work.
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

from bench.deployments import Deployments, Specq, starter
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

# for each method's processes; draft workers run only when the machine is otherwise idle, so they may start late
READY_S = 600.0
MOST_PORTIONS = 8  # times the number of needed prompts; the rest is for warm-up
WITH_TARGET = "the target's own"
Portion = Sequence[Prompt]


@suite("methods")
@option("--target", str, default_pair, "Target: a name, or a path.", show_default=SHOWN_PAIR)
@option("--draft", str, None, "An autoregressive draft model.", metavar="DIR", show_default=WITH_TARGET)
@repeatable(
    "--heads",
    str,
    (),
    "Directory of heads, or of a block drafter.",
    metavar="DIR",
    show_default=False,
)
@option(
    "--parallel",
    str,
    None,
    "A draft model that predicts several tokens in one pass.",
    metavar="DIR",
    show_default=WITH_TARGET,
)
@repeatable("--methods kinds", click.Choice(list(KINDS)), (), "Method to measure.", show_default="all with given files")
@option(
    "--bench",
    click.Path(exists=True, file_okay=False, path_type=Path),
    None,
    "Directory of JSONL files, each a data set.",
    show_default="bundled GSM8K, HumanEval and MT-bench",
)
@option("--sessions", COUNT, 1, "Number of sessions in flight.")
@option("--limit", COUNT, 5, "Number of prompts from each data set in each repetition.")
@option("--max-tokens", COUNT, 64, "Maximum tokens of each text.")
@option("--repeats", COUNT, 3, "Number of interleaved repetitions, each with other prompts.")
@repeatable("--temperature temperatures", Number(0), (0.0, 0.8), "Sampling temperature.")
@option("--settle-s", Number(0), 20.0, "Seconds in which `everything` learns which drafts pay off.")
@option("--shared-tokens", COUNT, SHARED_TOKENS, "Maximum tokens of ended jobs from which `suffix` drafts.")
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
    """Serve the same prompts by every way to draft, each in separate processes, in turns; compare the results.

    The table has speed, acceptance and equality of texts. Drafts are always used, and from one source at a time, so
    that the method is measured. `everything` has all sources at once and uses the sources that it measures to pay off.
    Each text must be plain decoding's, at every temperature. The exit status is 1 if one is not.
    """
    draft = draft_for(target) if draft is None else draft
    parallel = parallel_for(target) if parallel is None else parallel
    files = DraftFiles(draft, parallel, heads, shared_tokens)
    methods = choose(files, kinds)
    settings = _settings(target, bench, **given)
    least = settings.repeats + 1  # one for each repetition, and one for warm-up
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
    """Return as many lists as possible with `limit` prompts of each data set, without repeating a prompt.

    Raises ConfigError for a data set with too few prompts for `least` lists.
    """
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
    """Start all methods, warm them up, and let them take turns on `prompts`.

    warming    lists of other prompts.
    prompts    a list for each repetition.
    settle_s   minimum seconds of service in which a method that measures drafts learns which of them pay off.
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
    """Complete the first of these lists; then complete all lists repeatedly for `seconds`, if the method learns.

    Other tenants are used for this, so that no text is drafted from their ended jobs.
    """
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
