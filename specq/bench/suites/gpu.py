"""`specq bench gpu`: specq end to end, through broker and sockets, beside vLLM and transformers on the same GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from specq.bench.end_to_end import serving
from specq.bench.end_to_end.children import measure_in_child
from specq.bench.end_to_end.contest import Contestant, prepare, run, workload_options
from specq.bench.report import Report
from specq.bench.suite import COUNT, suite

CONTESTANTS = ("alone", "own", "one", "two", "two-own", "vllm", "vllm-spec", "transformers")


@suite("gpu")
@workload_options
@click.option("--only", multiple=True, type=click.Choice(CONTESTANTS), help="Contestants, in order.  [default: all]")
@click.option("--gpus", type=COUNT, default=1, show_default=True, help="GPUs; `two` and `two-own` need 2.")
def command(report: Report, *, only: tuple[str, ...], gpus: int, **options: Any) -> None:
    """Measure specq's deployments and its rivals, one after the other, since each fills the GPU.

    The models are the bundled pair inflated to large shapes. All contestants get the same prompts (GSM8K and HumanEval), three
    for each session, and generate as many tokens, greedily. own: the drafter in the verifier's process; one: in a process of
    its own on the same GPU; two: on a second GPU; two-own: in both places; alone: steps of both models by themselves; vllm,
    vllm-spec (its own draft model) and transformers (generate and assisted generation), where they are installed.
    """
    work = prepare(report, **options)
    names = [name for name in only or CONTESTANTS if gpus > 1 or name not in serving.SECOND]
    run(report, work, [(name, _contestant(name)) for name in names])


def _contestant(name: str) -> Contestant:
    return partial(serving.measure if name in serving.DEPLOYMENTS else measure_in_child, name)
