"""`specq bench broker-rate`: how many tokens a second pass through a broker on one core: `bench.broker_load` asks for
all it can.

A real broker on one core, its threads included; on the other cores one process that is verifier and clients.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click

from bench.broker_load import PATIENCE_S, Load, arguments
from bench.processes import output, process
from bench.report import Report, figure, show, tell
from bench.suite import COUNT, option, repeatable, suite
from bench.turns import rotated
from specq.config import DURABILITIES, free_address
from specq.runtime import Number, Tell, available_cores

UNITS = {"tokens": "tokens/s", "messages": "messages/s", "busy": "cores", "us": "us"}
NO_JOURNAL = "none"
# Heartbeats would be in the way of the measuring; nor are they missed.
QUIET = ("--liveness-ms", "600000", "--heartbeat-ms", "60000", "--log-level", "warning")


@suite("broker-rate")
@repeatable("--sessions", COUNT, (256,), "")
@repeatable("--tokens", COUNT, (1,), "Of each session in each step.")
@repeatable("--clients", COUNT, (1,), "That share them.")
@option("--drafters", click.IntRange(0), 0, "That receive each verdict.")
@repeatable("--journal", click.Choice((NO_JOURNAL, *DURABILITIES)), (NO_JOURNAL, *DURABILITIES), "Its durability.")
@option("--repeats", COUNT, 3, "Turns of each.")
@option("--seconds", Number(0.01), 2.0, "Of each turn.")
def command(
    report: Report, *, sessions: tuple[int, ...], tokens: tuple[int, ...], clients: tuple[int, ...], drafters: int,
    journal: tuple[str, ...], repeats: int, seconds: float,
) -> None:  # fmt: skip
    """Send a broker on one core the verdicts of steps as fast as its clients receive their tokens, and count these."""
    kinds = [RateKind(s, t, c, drafters, j) for s, t, c, j in product(sessions, tokens, clients, journal)]
    report.update(settings={"repeats": repeats, "seconds": seconds})
    found: defaultdict[RateKind, list[dict[str, float]]] = defaultdict(list)
    for kind, measured in broker_rate(kinds, repeats, seconds, tell):
        found[kind].append(measured)
        figures = {f"{kind}: {name}": figure(unit, [one[name] for one in found[kind]]) for name, unit in UNITS.items()}
        report.update(figures=figures)
    rows: list[tuple[object, ...]] = [
        ("SESSIONS", "TOKENS", "CLIENTS", "DRAFTERS", "JOURNAL", "TOKENS/S", "MESSAGES/S", "CORES", "US/TOKEN")
    ]
    for kind, turns in found.items():
        rate, messages, busy, us = (median(one[name] for one in turns) for name in UNITS)
        about = kind.sessions, kind.tokens, kind.clients, kind.drafters, kind.journal
        rows.append((*about, f"{rate:.0f}", f"{messages:.0f}", f"{busy:.2f}", f"{us:.1f}"))
    show(rows, ["medians; messages: those that clients received; cores: what the broker's process used"])


@dataclass(frozen=True, slots=True)
class RateKind:
    """What is measured: sessions of `tokens` a step each, shared among `clients`; `journal`: its durability, or
    none."""

    sessions: int
    tokens: int
    clients: int
    drafters: int
    journal: str

    def __str__(self) -> str:
        drafters = f", {self.drafters} drafters" if self.drafters else ""
        return f"{self.sessions} sessions x {self.tokens}, {self.clients} clients{drafters}, journal {self.journal}"


def broker_rate(
    kinds: list[RateKind], repeats: int, seconds: float, tell: Tell = bool
) -> Iterator[tuple[RateKind, dict[str, float]]]:
    """Yield what each kind gave, in turns, `repeats` times: tokens and messages a second, cores that the broker used,
    and microseconds of them for a token. Raises EngineError if a token is lost or doubled."""
    for repeat in range(repeats):
        for kind in rotated(kinds, repeat):
            tell(f"{repeat + 1} of {repeats}: {kind}")
            yield kind, _measure(kind, seconds)


def _measure(kind: RateKind, seconds: float) -> dict[str, float]:
    cores, broker = available_cores(), free_address()
    with ExitStack() as stack:
        journal = [NO_JOURNAL]
        if kind.journal != NO_JOURNAL:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            journal = [str(folder / "journal"), "--durability", kind.journal]
        options = ("--bind", broker, "--cores", str(cores[0]), *QUIET, "--journal", *journal)
        pid = stack.enter_context(process("specq", "broker", *options)).pid
        load = Load(
            broker, pid, kind.sessions, kind.tokens, kind.clients, kind.drafters, seconds, 1, cores[1:] or cores
        )
        asking = stack.enter_context(process("bench.broker_load", arguments(load)))
        (found,) = json.loads(output(asking, 2 * PATIENCE_S + 4 * seconds))
    return dict(found)
