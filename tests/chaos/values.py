"""The value fuzzer: forged messages of every role against running processes, with innocent jobs beside them.

    python -m tests.chaos.values --messages 100000 --seed 7 --out values.json

A broker with a journal, a verifier and a drafter run; `tests.chaos.forgers` has who attacks them, one role after the
other. What is right for the innocent jobs was asked of the same processes before. The exit status is 0 iff no job
beside was lost or wrong, every message was taken, and all processes live.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click
import zmq

from specq import Client
from specq.client import Request
from specq.config.values import free_address
from specq.protocol.types import ModelInfo
from specq.runtime.machine import describe
from tests.chaos.between import Between
from tests.chaos.forgers import ForgedBroker, ForgedClient, ForgedDrafter, ForgedVerifier, Peer
from tests.chaos.forging import Forger
from tests.chaos.load import Load, Prompts
from tests.chaos.processes import START_S, Deployment, real_prompts, toy_prompts

ROLES = ("client", "drafter", "verifier", "broker to verifier", "broker to drafter")
RATE = 6000  # messages a second at most: a broker lets each socket ask 2000 times
AT_ONCE = 32  # messages between two looks at what was answered
NUM_JOBS = 4
SETTLE_S = 60.0
END_S = 120.0  # for the jobs beside to end, when all is over
OTHER = "other"  # the forged verifier's model


class Field:
    """The processes, where they can be spoken to, and the client whose jobs run beside."""

    def __init__(self, directory: Path, *, real: bool, seed: int) -> None:
        self.seed, self.num_gone = seed, 0
        options = ("--heartbeat-ms", "250", "--liveness-ms", "10000")
        self.deployment = Deployment(directory, targets=1, drafters=1, real=real, options=options)
        self.broker = self.deployment.address
        self.between = Between(self.broker, Forger(random.Random(seed), {}))
        self.verifier = self._bind_target(real=real)
        commands = self.deployment.commands
        commands["draft-0"] = tuple(
            self.between.address if part == self.broker else part for part in commands["draft-0"]
        )

    def _bind_target(self, *, real: bool) -> str:
        """Return the address at which the verifier can be spoken to."""
        command = self.deployment.commands["target-0"]
        if not real:
            return command[-2]  # what it advertises
        address = free_address()
        self.deployment.commands["target-0"] = (*command, "--bind", address)
        return address

    def peer(self, role: str, model: ModelInfo, others: list[int]) -> Peer:
        """Return who plays a role. All but clients say that their model is another one."""
        own = dataclasses.asdict(model) | {"eos_ids": list(model.eos_ids)}
        rng = random.Random(f"{self.seed} {role}")
        other = own | {"name": OTHER, "fingerprint": OTHER}
        if role == "client":
            return ForgedClient(self.broker, Forger(rng, own, model.num_tokens, others=others))
        if role == "drafter":
            return ForgedDrafter(self.broker, Forger(rng, other, model.num_tokens))
        if role == "verifier":
            return ForgedVerifier(
                self.broker, Forger(rng, other | {"tokenizer_hash": OTHER}, model.num_tokens, others=others)
            )
        if role == "broker to verifier":
            return ForgedBroker(self.verifier, Forger(rng, own, model.num_tokens, others=others))
        self.between.forger.model, self.between.forger.others = own, others
        self.between.forger.vocab = model.num_tokens
        return self.between

    def memory(self) -> dict[str, int]:
        """Return the resident KiB of the processes that live."""
        found = {}
        for name, process in self.deployment.processes.items():
            if process.poll() is None:
                status = Path(f"/proc/{process.pid}/status").read_text()
                found[name] = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
        return found

    def last_words(self, name: str) -> str:
        """Return the end of what a process logged."""
        return (self.deployment.directory / f"{name}.log").read_text("utf-8", "replace")[-2000:]

    def stop(self) -> dict[str, int]:
        """Ask all to end; return how many messages workers said that they had dropped."""
        for name in ("draft-0", "target-0"):
            process = self.deployment.processes[name]
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        logs = {
            name: (self.deployment.directory / f"{name}.log").read_text("utf-8", "replace")
            for name in ("draft-0", "target-0")
        }
        return {name: int([-1, *re.findall(r"dropped=(\d+)", text)][-1]) for name, text in logs.items()}


def attack(field: Field, peer: Peer, num: int) -> str:
    """Say so many forged messages; return "" or why not all were taken."""
    started = time.monotonic()
    try:
        for number in range(num):
            peer.send()
            if number % AT_ONCE == 0:
                peer.hear()
                ahead = number / RATE - (time.monotonic() - started)
                time.sleep(max(0.0, ahead))
        peer.hear()
    except zmq.ZMQError as error:
        return f"after {peer.num_sent} messages nobody took any more: {error}"
    return ""


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """Return by how many MiB each process grew."""
    return {name: round((after[name] - before[name]) / 1024, 1) for name in before if name in after}


def play(field: Field, role: str, client: Client, load: Load, others: list[int], num: int) -> dict[str, Any]:
    """Play one role, and return its line of the report."""
    counts, tally = Counter(client.status()["counts"]), Counter(load.tally.counts)
    before, started = field.memory(), time.monotonic()
    peer = field.peer(role, client.served.info, others)
    trouble = attack(field, peer, num)
    if peer is not field.between:
        peer.__exit__(None, None, None)
    settled = load.recovered(time.monotonic(), SETTLE_S)  # what was queued is worked off
    dead = [name for name, process in field.deployment.processes.items() if process.poll() is not None]
    now = Counter(client.status()["counts"]) if "broker" not in dead else Counter()
    return {
        "sent": peer.num_sent,
        "seconds": round(time.monotonic() - started, 1),
        "trouble": trouble or ("" if settled is not None else f"jobs beside stood still for {SETTLE_S:g} s afterwards"),
        "settled_s": settled and round(settled, 2),
        "broker_counts": {name: now[name] - counts[name] for name in sorted(now) if now[name] != counts[name]},
        "jobs": {name: load.tally.counts[name] - tally[name] for name in ("jobs", "lost", "wrong", "doubled")},
        "dead": {name: field.last_words(name) for name in dead},
        "growth_mib": growth(before, field.memory()),
    }


@contextmanager
def recorded_ids(client: Client) -> Iterator[list[int]]:
    """Yield the list of the ids of all jobs that the client submits from now on, each once the broker has taken it.
    A peer that knew a random id earlier could submit its own job under it."""
    connection, ids = client._connection, list[int]()
    submit = connection.submit

    def recording(request: Request, sink: Any) -> None:
        own = [job.job_id for job in request.submits]

        def taken(event: Any) -> None:
            ids.extend(own)
            own.clear()
            sink(event)

        submit(request, taken)

    connection.submit = recording  # type: ignore[method-assign]
    yield ids


def run(
    num: int, seed: int, *, real: bool, show: Callable[[str], object], roles: tuple[str, ...] = ROLES
) -> dict[str, Any]:
    """Play all roles, one after the other; return the report."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        field = Field(Path(directory), real=real, seed=seed)
        with field.between, field.deployment:
            prompts = _prompts(field.deployment, real=real)
            with (
                Client(
                    field.broker, timeout_s=START_S, cache_dir=Path(directory) / "cache", model=_model(field)
                ) as client,
                recorded_ids(client) as ids,
                Load([client], prompts, NUM_JOBS) as load,
            ):
                for role in roles:
                    report[role] = play(field, role, client, load, ids, num)
                    show(line(role, report[role]))
                    if report[role]["dead"]:
                        break
                load.finish(1.0 if report[role]["dead"] else END_S)
            report["all"] = {
                "jobs": dict(load.tally.counts),
                "failures": load.tally.failures[:10],
                "dropped": field.stop(),
            }
            show(f"beside all: {report['all']}")
    return report


def _prompts(deployment: Deployment, *, real: bool) -> Prompts:
    """Return prompts and their texts, requested without an attack."""
    if not real:
        return toy_prompts()
    found = real_prompts(deployment)
    return chain(list(islice(found, 4)), found)


def _model(field: Field) -> str:
    with Client(field.broker, timeout_s=START_S) as client:
        field.deployment.wait_ready(client)
        return str(client.served.info.name)


def line(role: str, found: dict[str, Any]) -> str:
    """Return a role's line of the table."""
    jobs, dropped = found["jobs"], found["broker_counts"]
    return (
        f"{role:20} sent {found['sent']:7} in {found['seconds']:6} s | jobs beside {jobs['jobs']}, lost "
        f"{jobs['lost']}, wrong {jobs['wrong']}, all on after {found['settled_s']} s | dead "
        f"{', '.join(found['dead']) or 'none'} | growth MiB {found['growth_mib']} | broker {dropped} "
        f"{found['trouble']}"
    )


def is_good(report: dict[str, Any]) -> bool:
    """Whether no other party was affected."""
    roles = [found for role, found in report.items() if role != "all"]
    jobs = Counter(report["all"]["jobs"])
    whole = not any(found["dead"] or found["trouble"] for found in roles)
    return whole and jobs["jobs"] > 0 and not any(jobs[name] for name in ("lost", "wrong", "doubled"))


@click.command()
@click.option("--messages", default=100_000, show_default=True, help="Of each role.")
@click.option("--seed", default=0, show_default=True, help="Of everything random.")
@click.option("--role", "roles", multiple=True, type=click.Choice(ROLES), help="Only these; may be repeated.")
@click.option("--toy", is_flag=True, help="With toy models instead of the bundled pair.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(messages: int, seed: int, roles: tuple[str, ...], toy: bool, out: Path | None) -> None:
    """Play all roles, print a line for each, end with status 1 if anybody was hurt."""
    report = run(messages, seed, real=not toy, show=click.echo, roles=roles or ROLES)
    if out is not None:
        out.write_text(json.dumps(describe() | report, indent=2) + "\n")
    sys.exit(0 if is_good(report) else 1)


if __name__ == "__main__":
    main()
