"""`specq bench rivals`: specq beside transformers and llama.cpp on the processors of this machine."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import click

from bench.report import Report, figure, show, tell
from bench.rivals import summary
from bench.rivals.children import memory_of
from bench.rivals.field import Field, all_names, field
from bench.rivals.grid import LENGTH, SETTLE_S, Cell, Grid, measure_prefill
from bench.rivals.llama import HOW_TO_GET, is_installed
from bench.suite import COUNT, option, repeatable, suite
from specq.engines import ARITHMETICS
from specq.models import SHOWN_PAIR, default_pair
from specq.runtime import Number
from specq.samples import DATA, Prompt, codec_of, files_of, load_prompts, shipped

UNITS, PREFILL, MEMORY = "units", "prefill", "memory"
NOT_COUNTED = -1  # the number of a prompt for warm-up
NOTES = (
    (
        "one session: tokens after the first ones and their seconds, prompt by prompt; in brackets 95% intervals of "
        "the median ratio"
    ),
    (
        "several sessions: all tokens and seconds of specq, prompts in memory; of llama.cpp, whose bindings complete "
        "one text at a time, the prompts one after the other, and the seconds after each first token"
    ),
    f"specq's defaults, which measure whether drafts pay, have served for {SETTLE_S:.0f} s before a cell counts",
    "llama.cpp's bindings draft by prompt lookup; they offer no speculation with a draft model",
)


@suite("rivals")
@option("--model", str, default_pair, "Target. llama.cpp needs a GGUF file.", show_default=SHOWN_PAIR)
@option("--draft-model", str, default_pair, "Draft model of specq and the assistant.", show_default=SHOWN_PAIR)
@option("--arithmetic", click.Choice(ARITHMETICS), "auto", "specq's arithmetic of a GGUF file.")
@option(
    "--prompts",
    click.Path(exists=True, file_okay=False, path_type=Path),
    DATA / "chat",
    "Directory of JSONL files: data sets in addition to GSM8K and HumanEval.",
    show_default="bundled MT-bench",
)
@option("--numseqs", COUNT, 20, "Number of prompts from each data set.")
@option("--output-len", COUNT, 64, "Maximum tokens of each text.")
@repeatable("--temperature", Number(0), (0.0, 0.8), "Sampling temperature.")
@repeatable("--sessions", COUNT, (1, 4, 16), "Number of sessions in flight.")
@repeatable("--only", click.Choice(all_names()), (), "Contestant to measure.", show_default="all")
@option("--prefill-repeats", click.IntRange(0), 7, f"Number of prompts of {LENGTH} tokens. 0: none.")
@option(
    "--seconds", Number(0), None, "Start no measurement after this time. --resume continues.", show_default="no limit"
)
@click.option("--resume", is_flag=True, help="Keep the results in the file of --out. Measure the rest.")
def command(
    report: Report, *, prompts: Path, numseqs: int, output_len: int, seconds: float | None, resume: bool, **given: Any
) -> None:
    """Measure specq beside transformers and llama.cpp: all complete the same prompts in turn, in separate processes.

    One session, greedy and sampled: transformers `generate` and assisted generation (every third prompt). llama.cpp
    runs with one thread, with one a core, with its prompt lookup, and in the format that is fastest there. specq runs
    in four ways: plain, by lookup, with a draft worker, and with the draft model in the verifier's process. Several
    sessions: specq's four, and llama.cpp one text after the other.
    """
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    names, found = given["only"] or tuple(all_names()), load(given["model"], prompts, numseqs)
    if resume:
        report.resume()
    report.update(settings=given | {"output_len": output_len, "num_prompts": len(found), "only": names})
    report.content["results"] = {UNITS: {}, PREFILL: []} | report.content["results"]
    cells = [Cell(temperature, sessions) for sessions in given["sessions"] for temperature in given["temperature"]]
    grid = Grid(cells, found, output_len)
    _measure(report, grid, found, names, end, given)
    _show(report)


def load(model: str, directory: Path, numseqs: int) -> list[Prompt]:
    """Return the prompts that ship with specq, and those of a directory's files; raises ConfigError if it has none."""
    return load_prompts((*shipped(), *files_of(directory)), numseqs, codec_of(model))


def _measure(
    report: Report, grid: Grid, prompts: list[Prompt], names: tuple[str, ...], end: float, given: dict[str, Any]
) -> None:
    """Measure what is missing until the time `end` (monotonic clock), and report each part."""
    results = report.content["results"]
    num_missing = given["prefill_repeats"] - len(results[PREFILL])
    if num_missing <= 0 and not grid.missing(results[UNITS]):
        return
    with field(names, given["model"], given["draft_model"], tell, given["arithmetic"]) as found:
        report.update(settings={"about": found.about})
        for name, unit in grid.run(found.contestants, results[UNITS], end, tell):
            results[UNITS][name] = unit
            report.update(results={MEMORY: _memory(found)})
        if num_missing > 0 and time.monotonic() < end:
            measure_prefill(found.contestants, prompts, NOT_COUNTED)
        while len(results[PREFILL]) < given["prefill_repeats"] and time.monotonic() < end:
            results[PREFILL].append(measure_prefill(found.contestants, prompts, len(results[PREFILL])))
            tell(f"prompts of {LENGTH} tokens: {results[PREFILL][-1]}")
        report.update(figures=_figures(results), results={MEMORY: _memory(found)})


def _memory(found: Field) -> dict[str, Any]:
    return {group: memory_of(processes) for group, processes in found.processes.items()}


def _figures(results: dict[str, Any]) -> dict[str, Any]:
    rates = summary.prefill_rates(results[PREFILL])
    prefill = {f"prefill {name}": figure("tokens/s", own) for name, own in rates.items()}
    return summary.figures(results[UNITS]) | prefill


def _show(report: Report) -> None:
    results = report.content["results"]
    units = results[UNITS]
    show(summary.table(units), NOTES if is_installed() else (*NOTES, "", HOW_TO_GET))
    for rows in (
        summary.dataset_table(units),
        summary.prefill_table(summary.prefill_rates(results[PREFILL])),
        summary.memory_table(results.get(MEMORY, {})),
        summary.asked_table(units),
    ):
        click.echo()
        show(rows)
