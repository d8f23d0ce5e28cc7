"""`specq bench steps`: the time of a verify step with an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import click

from bench.engine_steps import greedy_steps, measure, measure_prompts
from bench.report import Figure, Report, figure, show, tell
from bench.suite import COUNT, option, repeatable, suite
from specq.config import parsed, read_own
from specq.engines import ENGINES, Engine, EngineSpec
from specq.models import SHOWN_PAIR, default_pair, resolve_model

MAX_STEP_ROWS, KV_SLOTS = 2048, 1 << 14


@suite("steps")
@option("--engine", click.Choice(list(ENGINES)), "torch", "Engine that runs the steps.")
@option("--model", str, default_pair, "Target: a name, or a path.", show_default=SHOWN_PAIR)
@option("--device", str, "auto", "As in `specq worker --role target`.")
@option("--dtype", str, "auto", "As in `specq worker --role target`.")
@repeatable("--engine-option", str, (), "Option of the engine.", metavar="NAME=VALUE", show_default=False)
@repeatable("--sessions", COUNT, (1, 8), "Number of sessions.")
@repeatable("--drafts", click.IntRange(0), (0, 4, 8), "Drafted tokens of each session.")
@option("--context", click.IntRange(2), 256, "Tokens of context before the step.")
@repeatable("--prompt prompts", COUNT, (), "Also time steps with prompts of this many tokens.", show_default="none")
@option("--repeats", COUNT, 22, "Number of counted steps of each kind.")
@click.option(
    "--kernels",
    is_flag=True,
    help="Also sum up the device's kernels of greedy steps. The rest of a step is host time.",
)
def command(
    report: Report,
    *,
    engine: str,
    model: str,
    sessions: tuple[int, ...],
    drafts: tuple[int, ...],
    context: int,
    prompts: tuple[int, ...],
    repeats: int,
    kernels: bool,
    **options: Any,
) -> None:
    """Time verify steps of sessions with chains of random drafts, through the common interface of engines.

    With --prompt also steps that compute whole prompts of --sessions new sessions.
    """
    shapes = {"sessions": sessions, "drafts": drafts, "context": context, "prompts": prompts}
    asked = {"engine": engine, "model": model} | shapes
    if kernels:
        from bench.device import check_device  # imports torch, as an engine does

        check_device()
    report.update(settings=asked | options | {"repeats": repeats, "kernels": kernels})
    began, rows = time.perf_counter(), max(max(sessions) * max(1 + max(drafts), *prompts, 1), MAX_STEP_ROWS)
    found: dict[str, Figure] = {}
    with _loaded(engine, model, max_sessions=max(sessions), max_step_rows=rows, **options) as running:
        about = {"dtype": running.info.dtype, "kv_slots": running.info.kv_slots}
        report.update(results=about | {"start_s": round(time.perf_counter() - began, 1)})
        timed = chain(
            measure(running, sessions, drafts, context, repeats), measure_prompts(running, prompts, sessions, repeats)
        )
        for kind, times in timed:
            found[kind] = figure("ms", times)
            report.update(figures=found)
            tell(f"{kind}: {found[kind]['median']:.3f} ms")
        if kernels:
            found |= _kernels(report, running, sessions, drafts, context)
            report.update(figures=found)
    show([("WHAT", "MS"), *((kind, one["median"]) for kind, one in found.items())])


def _kernels(
    report: Report, running: Engine, sessions: tuple[int, ...], drafts: tuple[int, ...], context: int
) -> dict[str, Figure]:
    """Report the kernels of each kind of greedy step; return their total times."""
    from bench.device import kernels  # imports torch

    found, figures = dict[str, Any](), dict[str, Figure]()
    for kind, run in greedy_steps(running, sessions, drafts, context):
        found[kind] = kernels(run)
        figures[f"{kind}, device"] = figure("ms", [sum(one["us_a_step"] for one in found[kind]) / 1e3])
        report.update(results={"kernels": found})
    return figures


@contextmanager
def _loaded(engine: str, model: str, *, engine_option: tuple[str, ...], **options: Any) -> Iterator[Engine]:
    """Make an engine, and let it free the device afterwards."""
    own = {} if engine == "vllm" else {"kv_slots": KV_SLOTS}
    spec: EngineSpec = ENGINES.resolve(engine)
    given = read_own(spec.options, parsed(engine_option)).arguments()
    running = spec.make(resolve_model(model, "target"), **options, **own, **given)
    try:
        yield running
    finally:
        running.shutdown()
