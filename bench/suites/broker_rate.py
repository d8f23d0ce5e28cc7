"""`specq bench broker-rate`: how many tokens a second pass through a broker on one core.

`bench.broker_load` puts the maximum load on it. A real broker runs on one core, its threads included. One process that
is verifier and clients runs on the other cores.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import click

from bench.broker_load import PATIENCE_S, Load, arguments
from bench.deployments import output, process
from bench.report import Report, figure, show, tell
from bench.suite import COUNT, option, repeatable, suite
from bench.turns import rotated
from specq.config import DURABILITIES, free_address
from specq.runtime import Number, Tell, available_cores

UNITS = {"tokens": "tokens/s", "messages": "messages/s", "busy": "cores", "us": "us"}
NO_JOURNAL = "none"
# Heartbeats would disturb the measurement, and they are not needed.
QUIET = ("--liveness-ms", "600000", "--heartbeat-ms", "60000", "--log-level", "warning")


@suite("broker-rate")
@repeatable("--sessions", COUNT, (256,), "Number of sessions.")
@repeatable("--tokens", COUNT, (1,), "Tokens of each session in each step.")
@repeatable("--clients", COUNT, (1,), "Number of clients that share the sessions.")
@option("--database", str, "", "PostgreSQL address; measure journals there too, in databases that are dropped again.")
@option("--drafters", click.IntRange(0), 0, "Number of drafters that receive each verdict.")
@repeatable("--journal", click.Choice((NO_JOURNAL, *DURABILITIES)), (NO_JOURNAL, *DURABILITIES), "Durability.")
@option("--repeats", COUNT, 3, "Number of turns of each kind.")
@option("--seconds", Number(0.01), 2.0, "Seconds of each turn.")
def command(
    report: Report, *, sessions: tuple[int, ...], tokens: tuple[int, ...], clients: tuple[int, ...], database: str,
    drafters: int, journal: tuple[str, ...], repeats: int, seconds: float,
) -> None:  # fmt: skip
    """Send a broker on one core verdicts as fast as its clients receive the tokens, and count the tokens."""
    places = [(one, at) for one in journal for at in (("", database) if database and one != NO_JOURNAL else ("",))]
    kinds = [RateKind(s, t, c, drafters, *j) for s, t, c, j in product(sessions, tokens, clients, places)]
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
        about = kind.sessions, kind.tokens, kind.clients, kind.drafters, kind.place
        rows.append((*about, f"{rate:.0f}", f"{messages:.0f}", f"{busy:.2f}", f"{us:.1f}"))
    show(rows, ["medians; messages: those that clients received; cores: what the broker's process used"])


@dataclass(frozen=True, slots=True)
class RateKind:
    """A kind of measurement: sessions with `tokens` a step each, shared among `clients`.

    journal: its durability, or none. database: the PostgreSQL address of the journal. "": a file.
    """

    sessions: int
    tokens: int
    clients: int
    drafters: int
    journal: str
    database: str = ""

    @property
    def place(self) -> str:
        return f"{self.journal}, PostgreSQL" if self.database else self.journal

    def __str__(self) -> str:
        drafters = f", {self.drafters} drafters" if self.drafters else ""
        return f"{self.sessions} sessions x {self.tokens}, {self.clients} clients{drafters}, journal {self.place}"


def broker_rate(
    kinds: list[RateKind], repeats: int, seconds: float, tell: Tell = bool
) -> Iterator[tuple[RateKind, dict[str, float]]]:
    """Yield the results of each kind, in turns, `repeats` times.

    They are tokens and messages a second, cores that the broker used, and their microseconds for a token. Raises
    EngineError if a token is lost or doubled.
    """
    for repeat in range(repeats):
        for kind in rotated(kinds, repeat):
            tell(f"{repeat + 1} of {repeats}: {kind}")
            yield kind, _measure(kind, seconds)


def _measure(kind: RateKind, seconds: float) -> dict[str, float]:
    cores, broker = available_cores(), free_address()
    with ExitStack() as stack:
        journal = [NO_JOURNAL]
        if kind.journal != NO_JOURNAL:
            if kind.database:
                place = stack.enter_context(new_database(kind.database))
            else:
                place = str(Path(stack.enter_context(TemporaryDirectory())) / "journal")
            journal = [place, "--durability", kind.journal]
        options = ("--bind", broker, "--cores", str(cores[0]), *QUIET, "--journal", *journal)
        pid = stack.enter_context(process("specq", "broker", *options)).pid
        load = Load(
            broker, pid, kind.sessions, kind.tokens, kind.clients, kind.drafters, seconds, 1, cores[1:] or cores
        )
        asking = stack.enter_context(process("bench.broker_load", arguments(load)))
        (found,) = json.loads(output(asking, 2 * PATIENCE_S + 4 * seconds))
    return dict(found)


@contextmanager
def new_database(address: str) -> Iterator[str]:
    """Create a database beside the one at an address, yield its address, and drop it."""
    import psycopg  # of an extra

    name = f"specq_bench_{os.getpid()}"
    place = urlsplit(address)
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield f"postgresql://{place.netloc}/{name}{'?' * bool(place.query)}{place.query}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
