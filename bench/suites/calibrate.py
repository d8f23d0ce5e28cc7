"""`specq bench calibrate`: this machine and a pair of models, beside the simulator's prediction for them.

The models are timed on the cores on which they will serve, alone and beside each other, the target with help and
without. The drafter's choices along the target's own texts are recorded. The other costs of the processes are measured
while they serve other jobs. Hops are a round trip over real sockets. No value is fitted to the predicted runs. The
machine must be idle; the report has the processor time of other processes during a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click
import numpy as np

from bench.calibrate import neighbours
from bench.calibrate.compare import compared, predict, rows
from bench.calibrate.costs import profile
from bench.calibrate.serving import Prompt, Setting, measure, serving
from bench.report import Figure, Report, figure, show, tell
from bench.suite import COUNT, option, repeatable, suite
from bench.suites.roundtrip import roundtrip
from specq.client import Result
from specq.doctor import hardware
from specq.models import SHOWN_PAIR, default_pair
from specq.processes.deployment import divide_cores
from specq.protocol import MODES
from specq.runtime import Number, available_cores, log
from specq.samples import codec_of, load_prompts
from specq.simulate.scenarios import Measured
from specq.simulate.stubs import Choices, Texts

Runs = dict[tuple[float, str], tuple[dict[str, Any], list[Result]]]  # figures and results by round trip and mode

OTHER_JOBS = {"humaneval": "gsm8k"}  # data set of the compared jobs -> data set of the jobs that measure processes


@suite("calibrate")
@option("--model", str, default_pair, "Target: a name, or a path.", show_default=SHOWN_PAIR)
@option("--draft-model", str, default_pair, "Draft model: a name, or a path.", show_default=SHOWN_PAIR)
@repeatable("--rtt rtts", Number(0), (0.0, 20.0), "Round trip between drafters and broker in ms.")
@repeatable("--mode modes", click.Choice(MODES), tuple(MODES), "Mode of the jobs.", show_default="all")
@option("--drafters", COUNT, 1, "Number of draft workers.")
@option("--in-flight", COUNT, 1, "Number of jobs at a time.")
@repeatable(
    "--line",
    str,
    (),
    "Further option of bench.delay_proxy for the drafters' line, e.g. --cut-every-s=10.",
    show_default=False,
)
@option("--dataset", str, "gsm8k", "Prompts: gsm8k, humaneval, or a JSONL file.")
@option("--num-prompts", COUNT, 16, "Number of jobs of each run.")
@option("--output-len", click.IntRange(2), 128, "Tokens of each job.")
@option("--repeats", COUNT, 6, "Repetitions of each model timing, before each round trip's runs.")
def command(
    report: Report,
    *,
    rtts: tuple[float, ...],
    modes: tuple[str, ...],
    dataset: str,
    num_prompts: int,
    repeats: int,
    **options: Any,
) -> None:
    """Measure this machine, run real processes over a network with delays, simulate them, and compare.

    `specq simulate --calibrate REPORT` uses the figures. The machine must be idle.
    """
    log.configure("error")
    setting = Setting(**options)
    asked = {"dataset": dataset, "num_prompts": num_prompts, "repeats": repeats}
    report.update(settings=asdict(setting) | asked | {"rtts": rtts, "modes": modes})
    prompts, others = (_prompts(setting, name, num_prompts) for name in (dataset, OTHER_JOBS.get(dataset, "humaneval")))
    models = _load(setting)
    real = _run(setting, prompts, rtts, modes, lambda: models.sweep(repeats))
    texts = next(iter(real.values()))[1]
    said = list(zip(prompts, (result.token_ids for result in texts), strict=True))
    measured = _measure(setting, models, said, repeats, others)
    runs = list(_compared(real, _tables(setting, measured), said, measured.choices or ()))
    report.update(figures=_figures(runs), results={"runs": runs, "measured": asdict(measured)})
    show(rows(runs))


def _prompts(setting: Setting, dataset: str, count: int) -> list[Prompt]:
    return [prompt.token_ids for prompt in load_prompts((dataset,), count, codec_of(setting.model))]


def _compared(real: Runs, tables: dict[str, Any], said: Texts, choices: Choices) -> Iterator[dict[str, Any]]:
    """Yield each run beside its prediction."""
    for rtt_ms in dict.fromkeys(rtt_ms for rtt_ms, _ in real):
        found = {mode: figures for (rtt, mode), (figures, _) in real.items() if rtt == rtt_ms}
        predicted = predict(tables, said, choices, rtt_ms, list(found))
        yield from (compared(rtt_ms, mode, figures, predicted[mode]) for mode, figures in found.items())


def _figures(runs: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    return {
        f"rtt {run['rtt_ms']:g} ms, {run['mode']}, {side}": figure("tokens/s", [run[side]["tokens_per_second"]])
        for run in runs
        for side in ("measured", "predicted")
    }


def _load(setting: Setting) -> hardware.Models:
    """Load the pair on the cores on which it will serve."""
    (target, draft), helpers = _cores(setting), _helper_cores(setting)
    with hardware.pinned(target):
        engine = hardware.load_engine(setting.model, len(target), helpers)
    with hardware.pinned(draft):
        proposer = hardware.load_proposer(setting.draft_model)
    return hardware.Models(engine, proposer, target, draft, setting.in_flight)


def _cores(setting: Setting) -> tuple[list[int], list[int]]:
    """Return the cores on which the target and the first drafter serve."""
    here = available_cores()
    shares = divide_cores(len(here), 1, setting.drafters)
    return [here[i] for i in shares.targets[0]], [here[i] for i in shares.drafters[0]]


def _helper_cores(setting: Setting) -> list[int]:
    """Return the cores on which other threads help the target."""
    here = available_cores()
    return [here[i] for i in divide_cores(len(here), 1, setting.drafters).broker] if len(here) > 1 else []


def _run(
    setting: Setting,
    prompts: Sequence[Prompt],
    rtts: Sequence[float],
    modes: Sequence[str],
    time_models: Callable[[], None],
) -> Runs:
    """Return figures and results of the real processes by (round trip, mode); all modes on the same processes.

    The models are timed before each round trip's runs, because machines drift.
    """
    found = {}
    for rtt_ms in rtts:
        time_models()
        with serving(setting, rtt_ms) as service:
            for mode in modes:
                found[rtt_ms, mode] = measure(service, prompts, setting, mode)
                rate = found[rtt_ms, mode][0]["tokens_per_second"]
                tell(f"rtt {rtt_ms:g} ms, {mode}: {rate} tokens/s")
    return found


def _measure(
    setting: Setting, models: hardware.Models, texts: Texts, repeats: int, others: Sequence[Prompt]
) -> Measured:
    """Measure everything that the simulation needs, and sum up the models' times.

    It measures the drafter's choices along the texts, how much the pair's processes slow each other down, and a hop. It
    also measures the costs besides the models while they serve the others' jobs.
    """
    choices = models.choices(texts)
    tell("timing each of the pair beside the other")
    stretches = _stretches(setting, models, repeats)
    tell("timing processes and hops")
    near_us = roundtrip(repeats=1, count=500, seconds=0.1)["direct"]["p50_us"]
    pass_ms = _ascending(models.pass_ms())
    return Measured(
        step_ms=_ascending(models.step_ms()),
        helped_ms=_ascending(models.step_ms(is_helped=True)),
        session_us=models.session_us(),
        pass_ms=pass_ms,
        choices=choices,
        host=profile(setting, others, pass_ms),
        network={"rtt_ms": near_us / 1e3, "near_rtt_ms": near_us / 1e3},
        machine=stretches | {"draft_cores": _draft_cores(setting)},
    )


def _stretches(setting: Setting, models: hardware.Models, repeats: int) -> dict[str, float]:
    """Return the stretches of MachineSettings: each model is timed beside the other, the target also with help."""
    target, draft = _cores(setting)
    found = {}
    with hardware.pinned(target):
        for name, is_helped in [("step_stretch", False), *([("helped_stretch", True)] if models.can_be_helped else [])]:
            steps = partial(models.some_steps, is_helped=is_helped)
            found[name] = neighbours.stretch(steps, "pass", setting.draft_model, draft, repeats)
    with hardware.pinned(draft):
        found["pass_stretch"] = neighbours.stretch(models.some_passes, "step", setting.model, target, repeats)
    return found


def _draft_cores(setting: Setting) -> int:
    """Return on how many cores of this machine the drafters serve."""
    return len(set(divide_cores(len(available_cores()), 1, setting.drafters).drafters))


def _ascending(points: list[list[float]]) -> list[list[float]]:
    """Return the points as a rising curve, without falls caused by noise.

    Disturbances only add time, so a load gets the least time that it or a larger one took.
    """
    times = np.minimum.accumulate([milliseconds for _, milliseconds in points][::-1])[::-1]
    return [[load, round(float(ms), 4)] for (load, _), ms in zip(points, times, strict=True)]


def _tables(setting: Setting, measured: Measured) -> dict[str, Any]:
    """Return the scenario of the real runs."""
    traffic = {
        "sessions": setting.in_flight,
        "output_tokens": setting.output_len,
    }
    return measured.applied_to({"traffic": traffic, "draft": {"drafters": setting.drafters}})
