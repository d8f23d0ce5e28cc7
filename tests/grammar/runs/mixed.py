"""Jobs with grammars under mixed loads: each ends with the text of plain decoding, which follows its grammar.

    python -m tests.grammar.runs.mixed --out mixed.json

- storm: 200 jobs with 200 different schemas at once.
- mixed: jobs with a grammar, free jobs and jobs whose grammar is refused, in turns.
- cancelled: jobs are stopped while their grammar is tried or built, beside others.
- one session: a verifier of one session. - evicted: KV for few of the sessions, so that they are evicted and come back.
- sync, jit: two draft workers, and jobs that wait for them.

All on `tiny`, over sockets. It needs the package jsonschema.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import click

from bench.deployments import deployment
from bench.grammars.forms import api_schemas
from specq.client import Client
from specq.processes.servers import Servers
from specq.runtime.machine import describe
from tests.grammar.runs.cases import fault_of
from tests.grammar.runs.ways import ALONE, ALWAYS, LIVENESS_MS, PATIENCE_S, Arguments, WayOutcome, serve

QUESTION = "Return JSON about a trip to Berlin."
REFUSED = ({"regex": "(?=a)b"}, {"lark": "start: x"}, {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}})


@dataclass(frozen=True)
class MixedLoad:
    """A deployment and its jobs. `cancelled`: how many other jobs are stopped meanwhile."""

    num_jobs: int = 64
    in_flight: int = 32
    drafters: int = 0
    target: Mapping[str, Any] = field(default_factory=lambda: ALONE)
    params: Mapping[str, Any] = field(default_factory=dict)
    has_others: bool = False
    cancelled: int = 0


SCENARIOS = {
    "storm": MixedLoad(200, 200),
    "mixed": MixedLoad(90, 32, has_others=True),
    "cancelled": MixedLoad(cancelled=100),
    "one session": MixedLoad(24, 24, target={**ALONE, "max_sessions": 1}),
    "evicted": MixedLoad(48, 48, target={**ALWAYS, "kv_slots": 700}),
    "sync": MixedLoad(32, 16, 2, ALWAYS, {"mode": "sync"}),
    "jit": MixedLoad(32, 16, 2, ALWAYS, {"mode": "jit"}),
}


def jobs_of(scenario: MixedLoad) -> list[Arguments]:
    """Return the jobs, each with another schema."""
    schemas = [schema for _, schema in api_schemas()]
    found = []
    for i in range(scenario.num_jobs):
        kind = i % 3 if scenario.has_others else 0
        grammar: dict[str, Any] = {"json_schema": schemas[i % len(schemas)]}
        if kind:
            grammar = {} if kind == 1 else REFUSED[i // 3 % len(REFUSED)]
        own = {"seed": i, "temperature": 0.8 * (i % 2), "max_tokens": 256 if grammar else 60}
        found.append({"prompt": QUESTION, "grammar": grammar, **own})
    return found


def stop_early(address: str, num: int, seed: int = 0) -> None:
    """Submit jobs with grammars that are new to the verifier, and stop each after a few milliseconds."""
    draw = Random(seed)

    def one(number: int) -> None:
        schema = {"type": "object", "properties": {f"p{number}": {"type": "string", "maxLength": 9 + number}}}
        with Client(address, timeout_s=PATIENCE_S) as own:
            own.submit(QUESTION, grammar={"json_schema": schema}, max_tokens=200)
            time.sleep(draw.uniform(0.0, 0.2))  # leaving the block stops the job

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(num)))


def run(scenario: MixedLoad) -> dict[str, Any]:
    """Run a scenario, and plain decoding of the same jobs, eight at a time."""
    made = deployment("tiny", "tiny", scenario.drafters, has_journal=True, **scenario.target)
    made = replace(made, broker=replace(made.broker, liveness_ms=LIVENESS_MS))
    jobs = jobs_of(scenario)
    with Servers(made) as servers:
        servers.wait_ready(600)
        with Client(servers.address, timeout_s=PATIENCE_S) as client, ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            beside = pool.submit(stop_early, servers.address, scenario.cancelled)
            found = serve(client, [job | dict(scenario.params) for job in jobs], scenario.in_flight)
            seconds = time.monotonic() - began
            beside.result()
            plain = serve(client, [job | {"mode": "plain"} for job in jobs], 8)
            counts = client.status().get("counts", {})
    return {"seconds": round(seconds, 1), **_compared(jobs, found, plain), "counts": counts}


def _compared(jobs: Sequence[Arguments], found: Sequence[WayOutcome], plain: Sequence[WayOutcome]) -> dict[str, Any]:
    faults = []
    for job, one, other in zip(jobs, found, plain, strict=True):
        fault = "" if one.finish != "stop" or not job["grammar"] else fault_of(job["grammar"], one.text)
        if (one.token_ids, one.finish, one.reason) != (other.token_ids, other.finish, other.reason):
            fault = f"{one.finish} {one.reason} {one.text!r}, but plainly {other.finish} {other.reason} {other.text!r}"
        is_refused = one.finish == "error" and job["grammar"] in REFUSED
        if one.finish == "error" and not is_refused:
            fault = fault or one.reason
        faults += [f"seed {job['seed']}: {fault}"] if fault else []
    ends = [one.finish for one in found]
    return {"jobs": len(jobs), **{name: ends.count(name) for name in ("stop", "length", "error")}, "faults": faults}


@click.command()
@click.option("--only", multiple=True, type=click.Choice([*SCENARIOS]), help="Run these alone.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(only: tuple[str, ...], out: Path | None) -> None:
    """Run the scenarios, and print what came of each."""
    report: dict[str, Any] = {}
    for name in only or SCENARIOS:
        report[name] = run(SCENARIOS[name])
        click.echo(f"{name}: {json.dumps(report[name], ensure_ascii=False)[:1500]}")
        if out is not None:
            about = describe()
            out.write_text(json.dumps(about | {"load": os.getloadavg(), "scenarios": report}, indent=1) + "\n", "utf-8")
    sys.exit(any(one["faults"] for one in report.values()))


if __name__ == "__main__":
    main()
