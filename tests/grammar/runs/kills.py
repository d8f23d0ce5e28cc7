"""Jobs with grammars while their processes are killed: each job must end with the text that plain decoding gave.

    python -m tests.grammar.runs.kills --kills 60 --out kills.json

Two verifiers, two draft workers and a broker with a journal, all of the bundled pair `tiny`, over sockets. Each is
killed with SIGKILL in the middle of the jobs and started again. Three of four kills hit a verifier. The texts that end
by `stop` follow their grammar, by jsonschema. It needs the package jsonschema, and Debian's json-schema-test-suite.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle, islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import click

from specq.models import resolve_model
from specq.runtime.machine import describe
from specq.text import TextCodec, load_tokenizer_files
from tests.chaos.load import Asked
from tests.chaos.processes import Deployment, attack, grammar_prompts
from tests.grammar.runs.cases import FORM_NAMES, fault_of, grammar_of
from tests.grammar.runs.combinations import taken_suite

PART = 5  # kills between two reports
RECOVERY_S = 120.0  # a verifier starts in 10 s, and others load the machine
ROLES = ("target", "target", "target", "draft", "target", "target", "target", "broker")


@click.command()
@click.option("--kills", default=60, show_default=True, help="Number of kills.")
@click.option("--jobs", default=12, show_default=True, help="Jobs at a time.")
@click.option("--seed", default=0, show_default=True, help="Of everything random.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(kills: int, jobs: int, seed: int, out: Path | None) -> None:
    """Kill processes in the middle of jobs with grammars, and print what came of it."""
    faults = [("kill", ROLES[i % len(ROLES)]) for i in range(kills)]
    Random(seed).shuffle(faults)
    taken_suite("tiny")
    grammars = [grammar_of(form, number) for number in range(3) for form in FORM_NAMES]
    report: dict[str, Any] = {"texts": len(grammars), "faults": {}, "invalid": [], "stuck": [], "failures": []}
    with TemporaryDirectory() as folder, Deployment(Path(folder), real=True) as deployment:
        asked = list(islice(grammar_prompts(deployment, grammars, {}), len(grammars)))
        report["invalid"] = _invalid(asked)
        for first in range(0, kills, PART):
            part = faults[first : first + PART]
            found = attack(deployment, cycle(asked), part, seed=seed + first, recovery_s=RECOVERY_S, num_jobs=jobs)
            _add(report, found.report())
            click.echo(json.dumps(report))
            if out is not None:  # what is known so far
                out.write_text(json.dumps(describe() | report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    sys.exit(any(report[name] for name in ("lost", "doubled", "wrong", "stuck", "invalid")))


def _add(report: dict[str, Any], found: dict[str, Any]) -> None:
    for name in ("jobs", "lost", "doubled", "wrong"):
        report[name] = report.get(name, 0) + found[name]
    for name, number in found["faults"].items():
        report["faults"][name] = report["faults"].get(name, 0) + number
    for name in ("stuck", "failures"):
        report[name] += found[name]
    report["recover_max_s"] = max(report.get("recover_max_s", 0.0), found["recover_max_s"] or 0.0)


def _invalid(asked: list[Asked]) -> list[str]:
    """Return the faults of the texts that ended before their most tokens."""
    codec = TextCodec(load_tokenizer_files(resolve_model("tiny", "target")))
    ended = [one for one in asked if len(one.expected) < one.params["max_tokens"]]
    faults = [fault_of(one.params["grammar"], codec.decode(one.expected)) for one in ended]
    return [fault for fault in faults if fault]


if __name__ == "__main__":
    main()
