"""What the journal costs, and what a dead verifier costs, with models that start at once; prints the figures, writes
JSON.

    python -m tests.chaos.figures journal --repeats 5 --out docs/results/journal_throughput.json
    python -m tests.chaos.figures failover --repeats 5 --out docs/results/failover.json

Goodput is tokens a second that clients get, over all jobs. Each verifier takes half of the jobs, so that with one of
two gone half is the most there can be.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from specq import Client
from specq.runtime.machine import describe
from tests.chaos.load import Load, wait_for
from tests.chaos.processes import JOBS, START_S, Deployment, toy_prompts

JOURNALS = {
    "none": ("--journal", "none"),
    "full": ("--durability", "full"),
    "process": ("--durability", "process"),
}
WARM_S, SETTLE_S = 1.0, 2.0
DETECTION_S = 1.5  # liveness and a heartbeat
NUM_TOKENS = 400

_OUT = click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures, JSON.")
_SECONDS = click.option("--seconds", default=5.0, show_default=True, help="Of each measurement.")
_REPEATS = click.option("--repeats", default=5, show_default=True)


@click.group()
def main() -> None:
    """Measure under load."""


@main.command()
@_REPEATS
@_SECONDS
@_OUT
def journal(repeats: int, seconds: float, out: Path | None) -> None:
    """Measure goodput without a journal and with each kind, in turn; the ratios are of neighbouring runs."""
    rates: dict[str, list[float]] = {name: [] for name in JOURNALS}
    for repeat in range(repeats):
        for name in list(JOURNALS)[:: -1 if repeat % 2 else 1]:
            rates[name].append(_goodput(JOURNALS[name], seconds))
            click.echo(f"journal {name}: {rates[name][-1]:.0f} tokens/s")
    ratios = {name: median(a / b for a, b in zip(found, rates["none"], strict=True)) for name, found in rates.items()}
    figures = {
        name: {
            "tokens_per_s": round(median(found), 1),
            "ratio": round(ratios[name], 3),
            "all": [round(r, 1) for r in found],
        }
        for name, found in rates.items()
    }
    _tell(figures, out)


def _goodput(options: tuple[str, ...], seconds: float) -> float:
    with (
        tempfile.TemporaryDirectory() as directory,
        Deployment(Path(directory), drafters=0, options=options) as deployment,
        Client(deployment.address, timeout_s=START_S, cache_dir=Path(directory)) as client,
    ):
        deployment.wait_ready(client)
        with Load(client, toy_prompts(NUM_TOKENS), 2 * JOBS) as load:
            time.sleep(WARM_S)
            return _measure(load, seconds)


def _measure(load: Load, seconds: float) -> float:
    start = time.monotonic()
    time.sleep(seconds)
    return load.tally.rate(start, start + seconds)


@main.command()
@_REPEATS
@_SECONDS
@_OUT
def failover(repeats: int, seconds: float, out: Path | None) -> None:
    """Kill one of two verifiers under load, and start it again: goodput before, after detection, and after its
    return."""
    runs = []
    for _ in range(repeats):
        runs.append(_failover(seconds))
        click.echo(json.dumps(runs[-1]))
    figures = {name: round(median(run[name] for run in runs), 3) for name in runs[0]}
    _tell({"median": figures, "runs": runs}, out)


def _failover(seconds: float) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as directory,
        Deployment(Path(directory), drafters=0, max_sessions=JOBS // 2) as deployment,
        Client(deployment.address, timeout_s=START_S, cache_dir=Path(directory)) as client,
    ):
        deployment.wait_ready(client)
        with Load(client, toy_prompts(NUM_TOKENS), JOBS) as load:
            time.sleep(WARM_S)
            before = _measure(load, seconds)
            deployment.kill("target-0")
            died = time.monotonic()
            wait_for(lambda: client.status()["counts"].get("workers_lost"), START_S)
            detected_s = time.monotonic() - died
            time.sleep(max(0.0, DETECTION_S - detected_s))
            after = _measure(load, seconds)
            deployment.start("target-0")
            deployment.wait_ready(client)
            time.sleep(SETTLE_S)
            returned = _measure(load, seconds)
            load.finish(START_S)
            counts = load.tally.counts
    return {
        "before_tokens_per_s": round(before, 1),
        "detected_s": round(detected_s, 3),
        "after_detection": round(after / before, 3),
        "after_return": round(returned / before, 3),
        **{name: counts[name] for name in ("jobs", "lost", "doubled", "wrong")},
    }


def _tell(figures: dict[str, Any], out: Path | None) -> None:
    click.echo(json.dumps(figures, indent=2))
    if out is not None:
        command = shlex.join(["python", "-m", "tests.chaos.figures", *sys.argv[1:]])
        out.write_text(json.dumps({**describe(command), "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
