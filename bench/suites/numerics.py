"""`specq bench numerics`: how often text depends on how a step was batched."""

from __future__ import annotations

from typing import Any

import click

from bench.report import Report, figure, show, tell
from bench.suite import COUNT, option, repeatable, suite
from specq.engines import ENGINES, Engine
from specq.models import resolve_model
from specq.protocol import SamplingParams
from specq.samples import shipped_token_ids

KV_SLOTS = 1 << 15
HEADER = ("FORMAT", "TEXTS", "TOKENS", "DIFFER", "WIDEST GAP")


@suite("numerics")
@option("--device", str, "auto", "As in `specq worker --role target`.")
@repeatable("--dtype dtypes", str, ("auto",), "Number format.", show_default=False)
@repeatable("--temperature temperatures", float, (0.0, 0.8), "Sampling temperature.", show_default=False)
@option("--seconds", float, 60.0, "Time for each number format and temperature.")
@option("--limit", COUNT, 64, "Maximum number of prompts.")
@option("--max-tokens", COUNT, 64, "Tokens of each text.")
@click.option("--eager", is_flag=True, help="Do not use our own kernels and CUDA graphs.")
@click.option(
    "--no-split-k", is_flag=True, help="Prevent cuBLAS from splitting sums into parts that depend on the rows."
)
def command(
    report: Report,
    *,
    dtypes: tuple[str, ...],
    temperatures: tuple[float, ...],
    seconds: float,
    limit: int,
    max_tokens: int,
    no_split_k: bool,
    **options: Any,
) -> None:
    """Decode prompts one session at a time and sixteen at a time with drafts, and compare the texts.

    Each number format and temperature gets --seconds. The report is written after each block of 16 prompts.
    --no-split-k is the option of torch and cuBLAS for equal sums in every batch. Compare a run with it and one without.
    """
    from bench import numerics

    if no_split_k:
        numerics.forbid_split_k()
    asked = {"dtypes": dtypes, "temperatures": temperatures, "seconds": seconds, "limit": limit}
    report.update(settings={**asked, "max_tokens": max_tokens, "no_split_k": no_split_k, **options})
    prompts = shipped_token_ids(limit)[:limit]
    rows = []
    for dtype in dtypes:
        engine = ENGINES.resolve("torch").make(
            resolve_model("tiny", "target"), dtype=dtype, kv_slots=KV_SLOTS, **options
        )
        numerics.warm_up(engine, prompts)
        for temperature in temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, logprobs=20)
            rows.append(_measure(report, f"{engine.info.dtype} T={temperature:g}", engine, prompts, params, seconds))
    show([HEADER, *rows])


def _measure(
    report: Report, key: str, engine: Engine, prompts: list[list[int]], params: SamplingParams, seconds: float
) -> tuple[object, ...]:
    """Measure one number format and temperature, and report after each block; return the row for the screen."""
    from bench.numerics import compare

    found: dict[str, Any] = {}
    for tally in compare(engine, prompts, params, seconds):
        found = tally.report()
        tell(f"{key}: {tally}")
        share = figure("share", [len(found["differing"]) / max(found["texts"], 1)])
        report.update(figures={f"{key}, texts that differ": share}, results={key: found})
    return (key, found["texts"], found["tokens"], len(found["differing"]), found["widest_gap"] or "-")
