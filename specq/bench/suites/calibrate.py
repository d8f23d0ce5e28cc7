"""`specq bench calibrate`: this machine and a pair of models, beside what the simulator predicts for them.

The models are timed by themselves, one thread on the cores that they will serve on; the drafter is asked what it would
have said along the target's own texts; the processes' own time is that of the real code with stub models; hops are a round
trip over real sockets. None of it is fitted to the runs that are predicted. The machine must be quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click

from specq.bench.calibrate import hardware, neighbours, sockets
from specq.bench.calibrate.compare import compared, predict, rows
from specq.bench.calibrate.serving import Prompt, Setting, measure, serving
from specq.bench.prompts import codec_of, load_prompts
from specq.bench.report import Figure, Report, figure, show, tell
from specq.bench.roundtrip import roundtrip
from specq.bench.suite import COUNT, suite
from specq.client import Result
from specq.models import SHOWN_PAIR, default_pair
from specq.protocol import MODES
from specq.runtime import available_cores, log
from specq.simulate.calibration import Measured
from specq.simulate.hosts import measure_host
from specq.simulate.settings import Scenario, TrafficSettings
from specq.simulate.stub_text import Texts
from workers.deployment import divide_cores

RTTS = (0.0, 20.0)
SOCKET_ENDS = ("draft_us", "verdict_us", "hear_us", "send_us")  # of HostSettings: each is one end of a message


@suite("calibrate")
@click.option("--model", default=default_pair, show_default=SHOWN_PAIR, help="Target: a name, or a path.")
@click.option("--draft-model", default=default_pair, show_default=SHOWN_PAIR, help="Draft model, likewise.")
@click.option("--rtt", "rtts", type=click.FloatRange(0), multiple=True, help="Round trips in ms.  [default: 0, 20]")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, help="May be repeated.  [default: all]")
@click.option("--drafters", type=COUNT, default=1, show_default=True, help="Draft workers.")
@click.option("--in-flight", type=COUNT, default=1, show_default=True, help="Jobs at a time.")
@click.option(
    "--line",
    multiple=True,
    help="More of the line to the drafters, as specq.bench.delay_proxy takes it: --cut-every-s=10.",
)
@click.option("--dataset", default="gsm8k", show_default=True, help="Prompts: gsm8k, humaneval, or a JSONL file.")
@click.option("--num-prompts", type=COUNT, default=16, show_default=True, help="Jobs of each run.")
@click.option("--output-len", type=click.IntRange(2), default=128, show_default=True, help="Tokens of each.")
@click.option(
    "--repeats",
    type=COUNT,
    default=6,
    show_default=True,
    help="Of each timing of a model, before each round trip's runs.",
)
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

    `specq simulate --calibrate REPORT` takes the figures. The machine must be quiet.
    """
    log.configure("error")
    setting = Setting(**options)
    asked = {"dataset": dataset, "num_prompts": num_prompts, "repeats": repeats}
    report.update(settings=asdict(setting) | asked | {"rtts": rtts or RTTS, "modes": modes or MODES})
    prompts = [prompt.token_ids for prompt in load_prompts((dataset,), num_prompts, codec_of(setting.model))]
    models = _load(setting)
    real = _run(setting, prompts, rtts or RTTS, modes or MODES, lambda: models.sweep(repeats))
    texts = next(iter(real.values()))[1]
    said = list(zip(prompts, (result.token_ids for result in texts), strict=True))
    measured = _measure(setting, models, said, repeats)
    tables = _tables(setting, measured)
    runs = [compared(*key, found, predict(tables, said, *key)) for key, (found, _) in real.items()]
    report.update(figures=_figures(runs), results={"runs": runs, "measured": asdict(measured)})
    show(rows(runs))


def _figures(runs: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    return {
        f"rtt {run['rtt_ms']:g} ms, {run['mode']}, {side}": figure("tokens/s", [run[side]["tokens_per_second"]])
        for run in runs
        for side in ("measured", "predicted")
    }


def _load(setting: Setting) -> hardware.Models:
    """Load the pair on the cores that it will serve on."""
    target, draft = _cores(setting)
    with hardware.pinned(target):
        engine = hardware.load_engine(setting.model, len(target))
    with hardware.pinned(draft):
        proposer = hardware.load_proposer(setting.draft_model)
    return hardware.Models(engine, proposer, target, draft)


def _cores(setting: Setting) -> tuple[list[int], list[int]]:
    """Return the cores on which the target and the first drafter serve."""
    here = available_cores()
    shares = divide_cores(len(here), 1, setting.drafters)
    return [here[i] for i in shares.targets[0]], [here[i] for i in shares.drafters[0]]


def _run(
    setting: Setting,
    prompts: Sequence[Prompt],
    rtts: Sequence[float],
    modes: Sequence[str],
    time_models: Callable[[], None],
) -> dict[tuple[float, str], tuple[dict[str, Any], list[Result]]]:
    """Return figures and results of the real processes by (round trip, mode); all modes on the same processes.

    The models are timed before each round trip's runs, since machines drift.
    """
    found = {}
    for rtt_ms in rtts:
        time_models()
        with serving(setting, rtt_ms) as client:
            for mode in modes:
                found[rtt_ms, mode] = measure(client, prompts, setting, mode)
                rate = found[rtt_ms, mode][0]["tokens_per_second"]
                tell(f"rtt {rtt_ms:g} ms, {mode}: {rate} tokens/s")
    return found


def _measure(setting: Setting, models: hardware.Models, texts: Texts, repeats: int) -> Measured:
    """Measure what the drafter thinks of the texts, what the pair's processes take from each other, the hosts' own time, and a
    hop; sum the models' times up."""
    choices = models.choices(texts)
    tell("timing each of the pair beside the other")
    stretches = _stretches(setting, models, repeats)
    tell("timing hosts and hops")
    hops = roundtrip(repeats=1, count=500, seconds=0.5)
    near_us = hops["direct"]["p50_us"]
    with hardware.pinned(_cores(setting)[0][:1]):
        end_us = sockets.end_us()
        host = measure_host(Scenario(traffic=TrafficSettings(sessions=setting.in_flight, seconds=5.0)))
    broker_us = max(hops["broker"]["p50_us"] / 2 - near_us, host["broker_us"])
    return Measured(
        step_ms=_ascending(models.step_ms()),
        session_us=models.session_us(),
        pass_ms=_ascending(models.pass_ms()),
        choices=choices,
        host=host | {name: host[name] + end_us for name in SOCKET_ENDS} | {"broker_us": broker_us},
        network={"rtt_ms": near_us / 1e3, "near_rtt_ms": near_us / 1e3},
        machine=stretches | {"draft_cores": _draft_cores(setting)},
    )


def _stretches(setting: Setting, models: hardware.Models, repeats: int) -> dict[str, float]:
    """Return `step_stretch` and `pass_stretch` as in MachineSettings: each of the pair is timed beside the other."""
    target, draft = _cores(setting)
    with hardware.pinned(target):
        step = neighbours.stretch(models.some_steps, "pass", setting.draft_model, draft, repeats)
    with hardware.pinned(draft):
        own = neighbours.stretch(models.some_passes, "step", setting.model, target, repeats)
    return {"step_stretch": step, "pass_stretch": own}


def _draft_cores(setting: Setting) -> int:
    """Return on how many cores of this machine the drafters serve."""
    return len(set(divide_cores(len(available_cores()), 1, setting.drafters).drafters))


def _ascending(points: list[list[float]]) -> list[list[float]]:
    """Return the points without the falls that noise makes."""
    highest, found = 0.0, []
    for load, milliseconds in points:
        highest = max(highest, milliseconds)
        found.append([load, round(highest, 4)])
    return found


def _tables(setting: Setting, measured: Measured) -> dict[str, Any]:
    """Return the scenario of the real runs."""
    traffic = {
        "sessions": setting.in_flight,
        "output_tokens": setting.output_len,
    }
    return measured.applied_to({"traffic": traffic, "draft": {"drafters": setting.drafters}})
