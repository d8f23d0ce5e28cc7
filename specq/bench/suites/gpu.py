"""`specq bench gpu`: specq end to end beside vLLM and transformers on the same GPU, and the parts of a step by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from specq.bench.end_to_end import serving
from specq.bench.end_to_end.children import measure_in_child
from specq.bench.end_to_end.contest import Contestant, prepare, run, workload_options
from specq.bench.gpu.parts import PARTS, Task, measure_parts
from specq.bench.report import Report
from specq.bench.suite import COUNT, suite
from specq.models import parse_shape

CONTESTANTS = ("alone", "own", "one", "two", "two-own", "vllm", "vllm-spec", "transformers")


@suite("gpu")
@workload_options
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*CONTESTANTS, *PARTS]),
    help="Contestants and parts; may be repeated.  [default: all contestants]",
)
@click.option("--gpus", type=COUNT, default=1, show_default=True, help="GPUs; `two` and `two-own` need 2.")
@click.option("--limit", type=COUNT, default=8, show_default=True, help="Prompts of each data set for `text`.")
def command(report: Report, *, only: tuple[str, ...], gpus: int, limit: int, **options: Any) -> None:
    """Measure specq's deployments and its rivals, one after the other, since each fills the GPU; or parts of a step.

    The models are the bundled pair inflated to large shapes. All contestants get the same prompts (GSM8K and HumanEval), three
    for each session, and generate as many tokens, greedily. own: the drafter in the verifier's process; one: in a process of
    its own on the same GPU; two: on a second GPU; two-own: in both places; alone: steps of both models by themselves; vllm,
    vllm-spec (its own draft model) and transformers (generate and assisted generation), where they are installed.

    The parts measure the torch engine and the draft model in this process, after the contestants: compiling (of kernels,
    beforehand, in many processes), floor (bandwidth, and a step at the least), generic (logits beside transformers'
    code), passes, steps, chains, profile (kernel by kernel), text (beside the small pair's, and speculation without sockets),
    tiles (of the decoder's products). Their pair is made in memory; --pair and --repeats do not matter to them.
    """
    contestants = [name for name in only or CONTESTANTS if name in CONTESTANTS]
    if contestants:
        names = [name for name in contestants if gpus > 1 or name not in serving.SECOND]
        run(report, prepare(report, **options), [(name, _contestant(name)) for name in names])
    parts = [name for name in PARTS if name in only]
    if parts:
        measure_parts(report, _task(report, parts, limit, **options))


def _contestant(name: str) -> Contestant:
    return partial(serving.measure if name in serving.DEPLOYMENTS else measure_in_child, name)


def _task(
    report: Report,
    parts: Sequence[str],
    num_prompts: int,
    *,
    target: str,
    draft: str,
    draft_shape: str,
    device: str,
    sessions: tuple[int, ...],
    output_len: int,
    **_others: Any,
) -> Task:
    """Return and report what the parts are asked to do."""
    from specq.bench.gpu.models import Pair, check_device

    check_device(device)
    shapes = {"target": parse_shape(target), "draft": parse_shape(draft, draft_shape)}
    asked = {"device": device, "sessions": sessions, "limit": num_prompts, "output_len": output_len}
    report.update(settings=asked | {f"{role}_model": asdict(shape) for role, shape in shapes.items()})
    return Task(Pair(shapes, device), sessions, num_prompts, output_len, parts)
