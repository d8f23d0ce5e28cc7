"""`specq bench gpu`: specq end to end beside vLLM on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import click

from bench.end_to_end import far, method_serving, serving, vllm
from bench.end_to_end.contest import ContestPart, prepare, run, workload_options
from bench.end_to_end.far import far_options
from bench.report import Report, tell
from bench.suite import COUNT, option, repeatable, suite
from specq.config import with_new_names
from specq.protocol import SpecqError

CONTESTANTS = ("own", "one", "two", "two-own", "ssd", "far", "vllm", "vllm-spec", "vllm-eagle3", "vllm-ngram")
ON_REQUEST = ("vllm-eagle3", "ssd")  # only if requested
SPECULATION = {"vllm-spec": "draft_model", "vllm-eagle3": "eagle3", "vllm-ngram": "ngram"}  # vLLM's own


@suite("gpu")
@workload_options
@repeatable(
    "--only",
    click.Choice([*CONTESTANTS, *method_serving.METHODS]),
    (),
    "Contestant, or way to draft, to measure.",
    show_default="all contestants but vllm-eagle3 and ssd",
)
@option("--gpus", COUNT, 1, "Number of GPUs. `two`, `two-own`, `ssd` need one more than --tensor-parallel-size.")
@repeatable("--depths", COUNT, (2, 3, 5), "Drafted tokens of `vllm-spec`, `vllm-eagle3` and `vllm-ngram`.")
@option("--vllm-processes", click.IntRange(1, 2), 2, "Processes of vLLM. With 2, its default, the engine has its own.")
@option(
    "--vllm-scheduling",
    click.Choice(["async", "default"]),
    "async",
    "Ask vLLM for asynchronous scheduling, or leave it to vLLM.",
)
@option(
    "--drafts",
    click.Choice(method_serving.DRAFTS),
    "always",
    "Use a way to draft always, or only when measured to pay off.",
)
@far_options
@click.option("--resume", is_flag=True, help="Keep the results in the file of --out. Measure the others.")
def command(
    report: Report,
    *,
    only: tuple[str, ...],
    gpus: int,
    depths: tuple[int, ...],
    vllm_processes: int,
    vllm_scheduling: str,
    drafts: str,
    far_drafters: int,
    far_model: str,
    rtt_ms: tuple[float, ...],
    turn_s: float,
    resume: bool,
    **options: Any,
) -> None:
    """Measure specq's deployments and its rivals, one after the other, because each fills the GPU.

    The models are the bundled pair inflated to large shapes. All contestants get the same prompts (GSM8K and
    HumanEval), --jobs-each for each session. They generate the same number of tokens at each temperature, without a
    restart.

    own: the drafter is in the verifier's process. one: it is in a separate process on the same GPU. two: it is on a GPU
    beside the verifier's. two-own: it is in both places. ssd: it is on a GPU beside the verifier's with SSD's fixed
    fan-outs. After a round that was not predicted, ssd goes without drafts, and `ssd jit` waits for a chain drafted
    just in time.

    far: draft workers run on this machine's cores, with the small drafter, behind a delay proxy, in turns with plain
    decoding.

    vllm: vLLM alone. vllm-spec: vLLM with its own draft model, in a new process for each depth. vllm-ngram: vLLM's
    prompt lookup, likewise. They run if vllm is installed. With --engine vllm specq's verifiers run the target in vLLM,
    too.

    Ways to draft (those of `specq bench methods` without a draft worker) each have a verifier of their own, with plain
    decoding on it. --parallel and --heads name their weights, and vllm-eagle3 drafts with the same head. Use
    --fresh-prompts with them: an EAGLE-3 head has no hidden states for the part of a prompt that the verifier has in
    its KV cache.
    """
    options = with_new_names("target.vllm", {name: value for name, value in options.items() if value is not None})
    names = _with_vllm(_contestants(only, gpus, options.get("tensor_parallel_size", 1)), only, options["engine"])
    if resume:
        report.resume()
    settings = far.FarSettings(far_drafters, far_model, rtt_ms, turn_s)
    vllm_options = {"num_processes": vllm_processes, "scheduling": vllm_scheduling}
    parts = [part for name in names for part in _parts(name, settings, depths, vllm_options, drafts)]
    failed = run(report, prepare(report, **options), parts)
    if failed:
        raise SpecqError(f"not measured: {', '.join(failed)}; why is above and in the report")


def _contestants(only: Sequence[str], gpus: int, tensor_parallel_size: int) -> list[str]:
    """Return the contestants: the requested ones, else all but some; UsageError if one needs another GPU."""
    has_another = gpus > tensor_parallel_size
    if not only:
        return [name for name in CONTESTANTS if name not in ON_REQUEST and (has_another or name not in serving.BESIDE)]
    for name in serving.BESIDE if not has_another else ():
        if name in only:
            raise click.UsageError(
                f"--only {name} drafts on a GPU beside the verifier's: it needs --gpus {tensor_parallel_size + 1}"
            )
    return list(only)


def _with_vllm(names: Sequence[str], only: Sequence[str], engine: str) -> list[str]:
    """Return the contestants that can be measured: without vLLM, its own are left out unless requested.

    Raises ModuleNotFoundError if a requested contestant needs vLLM, before a pair is made.
    """
    its_own = [name for name in names if name.startswith("vllm")]
    if find_spec("vllm") is not None:
        return list(names)
    if names and (engine == "vllm" or (its_own and only)):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    if its_own:
        tell(f"left out, since vllm is not installed: {', '.join(its_own)}")
    return [name for name in names if name not in its_own]


def _parts(
    name: str,
    settings: far.FarSettings,
    depths: Sequence[int],
    vllm_options: dict[str, Any],
    drafts: str,
) -> list[ContestPart]:
    """Return the parts of a contestant. vLLM's speculation has a part for each depth."""
    if name in SPECULATION:
        in_child = partial(vllm.measure_in_child, method=SPECULATION[name], **vllm_options)
        return [ContestPart(name, partial(in_child, depth=depth), f"K={depth}") for depth in depths]
    if name == "vllm":
        return [ContestPart(name, partial(vllm.measure_in_child, **vllm_options))]
    if name in method_serving.METHODS:
        return [ContestPart(name, partial(method_serving.measure, name, drafts=drafts))]
    if name == "far":
        return [ContestPart(name, partial(far.measure_far, settings))]
    return [ContestPart(name, partial(serving.measure, name))]
