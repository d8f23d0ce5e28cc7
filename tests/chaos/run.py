"""The chaos suite: prints what it injected and what came of it, and writes it as JSON.

    python -m tests.chaos.run --schedules 2000 --faults 200 --real 20 --frames 100000 --out chaos.json

The exit status is 0 iff nothing was lost, doubled or wrong, and nothing stood still.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import structlog

from specq.runtime.machine import describe
from tests.chaos.fuzz import fuzz
from tests.chaos.processes import Deployment, Siege, all_away, attack, faults_of, real_prompts, toy_prompts
from tests.chaos.schedule import play

REAL_ROLES = ("broker", "target", "draft")


@click.command()
@click.option("--schedules", default=2000, show_default=True, help="Random schedules under a virtual clock.")
@click.option("--faults", default=200, show_default=True, help="Kills of processes, and as many freezes.")
@click.option("--real", default=20, show_default=True, help="Kills and freezes of processes with the bundled pair.")
@click.option("--frames", default=100_000, show_default=True, help="Mutated messages.")
@click.option(
    "--away-s", default=30.0, show_default=True, help="Seconds that all verifiers, then all drafters, are away."
)
@click.option("--seed", default=0, show_default=True, help="Of everything random.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(schedules: int, faults: int, real: int, frames: int, away_s: float, seed: int, out: Path | None) -> None:
    """Run all, print the report, end with status 1 if anything went wrong."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    report: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "schedules": lambda: run_schedules(schedules, seed),
        "frames": lambda: run_frames(frames, seed),
        "processes": lambda: run_processes(faults, seed) if faults else {},
        "proxy": lambda: run_proxy(max(faults // 10, 1), seed) if faults else {},
        "all targets away": lambda: run_away("target", away_s) if away_s else {},
        "all drafters away": lambda: run_away("draft", away_s) if away_s else {},
        "bundled pair": lambda: run_real(real, seed) if real else {},
    }
    for name, part in parts.items():
        started = time.monotonic()
        report[name] = part()
        report[name]["seconds"] = round(time.monotonic() - started, 1)
        click.echo(f"{name}: {json.dumps(report[name])}")
    report["total"] = total(report)
    click.echo(f"total: {json.dumps(report['total'])}")
    if out is not None:
        out.write_text(json.dumps(describe() | report, indent=2) + "\n")
    sys.exit(0 if all(report["total"][name] == 0 for name in ("lost", "doubled", "wrong", "stuck")) else 1)


def total(report: dict[str, Any]) -> dict[str, Any]:
    """Return the sums over all parts."""
    parts = [part for part in report.values() if "faults" in part]
    maxima = [part["recover_max_s"] for part in parts if part["recover_max_s"] is not None]
    faults: Counter[str] = sum((Counter(part["faults"]) for part in parts), Counter())
    return {
        "faults": faults.total(),
        "jobs": sum(part["jobs"] for part in parts),
        **{name: sum(part[name] for part in parts) for name in ("lost", "doubled", "wrong")},
        "stuck": sum(len(part["stuck"]) for part in parts),
        "recover_max_s": max(maxima, default=None),
    }


def run_schedules(num: int, seed: int) -> dict[str, Any]:
    """Play schedules; one in which anything is amiss counts as a lost job, with its seed and reason."""
    siege, num_boundaries, num_given_up = Siege(), 0, 0
    for number in range(num):
        try:
            outcome = play(seed * 1_000_000 + number)
        except Exception as error:  # noqa: BLE001 - the others shall be played too
            where = traceback.extract_tb(error.__traceback__)[-1]
            siege.tally.failures.append(f"schedule {number}: {error or where.line}")
            siege.tally.counts["lost"] += 1
            continue
        siege.faults += outcome.faults
        siege.recoveries += outcome.recoveries
        siege.tally.counts["jobs"] += outcome.num_jobs
        num_boundaries += outcome.num_boundaries
        num_given_up += outcome.num_given_up
    return {"schedules": num, "boundaries": num_boundaries, "given_up": num_given_up} | siege.report()


def run_frames(num: int, seed: int) -> dict[str, Any]:
    """Send mutated messages to every party."""
    return {"mutated": num, **fuzz(num, seed)}


def run_processes(num: int, seed: int) -> dict[str, Any]:
    """Kill and freeze processes with toy models."""
    with tempfile.TemporaryDirectory() as directory, Deployment(Path(directory)) as deployment:
        return attack(deployment, toy_prompts(), faults_of(num, seed=seed), seed=seed).report()


def run_proxy(num: int, seed: int) -> dict[str, Any]:
    """The same behind links that delay what they carry and break."""
    with tempfile.TemporaryDirectory() as directory, Deployment(Path(directory), proxied=True) as deployment:
        siege = attack(deployment, toy_prompts(), faults_of(num, seed=seed), seed=seed)
        return siege.report()


def run_away(role: str, seconds: float) -> dict[str, Any]:
    """Let all workers of a role be away."""
    with tempfile.TemporaryDirectory() as directory, Deployment(Path(directory)) as deployment:
        return all_away(deployment, role, seconds).report()


def run_real(num: int, seed: int) -> dict[str, Any]:
    """Kill and freeze processes with the bundled pair."""
    kinds = ["kill" if i % 2 else "stop" for i in range(num)]
    random.Random(seed).shuffle(kinds)
    faults = [(kind, REAL_ROLES[i % len(REAL_ROLES)]) for i, kind in enumerate(kinds)]
    with tempfile.TemporaryDirectory() as directory, Deployment(Path(directory), real=True) as deployment:
        prompts = real_prompts(deployment)
        return attack(deployment, prompts, faults, seed=seed, recovery_s=60.0).report()


if __name__ == "__main__":
    main()
