"""`specq bench rivals`: those beside whom `specq bench gpu` measures specq, by themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from specq.bench.end_to_end.children import measure_in_child
from specq.bench.end_to_end.contest import prepare, run, workload_options
from specq.bench.report import Report
from specq.bench.suite import suite

NAMES = ("vllm", "vllm-spec", "transformers", "alone")


@suite("rivals")
@workload_options
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Rivals, in order.  [default: all]")
def command(report: Report, *, only: tuple[str, ...], **options: Any) -> None:
    """Measure vLLM, vLLM with its own draft model, transformers, and specq's two models alone, each in its own process."""
    work = prepare(report, **options)
    run(report, work, [(name, partial(measure_in_child, name)) for name in only or NAMES])
