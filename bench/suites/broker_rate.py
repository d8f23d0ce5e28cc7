"""`specq bench broker-rate`: how many tokens a second pass through a broker on one core.

`bench.broker_load` puts the maximum load on it. A real broker runs on one core, its threads included. One process that
is verifier and clients runs on the other cores.
"""

from __future__ import annotations

import json
import secrets
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
JOBS_APART = 100_000  # between the ids of two brokers
# Heartbeats would disturb the measurement, and they are not needed.
QUIET = ("--liveness-ms", "600000", "--heartbeat-ms", "60000", "--log-level", "warning")


@suite("broker-rate")
@repeatable("--sessions", COUNT, (256,), "Number of sessions.")
@repeatable("--tokens", COUNT, (1,), "Tokens of each session in each step.")
@repeatable("--clients", COUNT, (1,), "Number of clients that share the sessions.")
@option("--drafters", click.IntRange(0), 0, "Number of drafters that receive each verdict.")
@repeatable("--brokers", COUNT, (1,), "Number of brokers, each with its own sessions, clients and drafters.")
@option("--database", str, "", "Address of a PostgreSQL server: the journal is a new database there, for all brokers.")
@repeatable("--journal", click.Choice((NO_JOURNAL, *DURABILITIES)), (NO_JOURNAL, *DURABILITIES), "Durability.")
@option("--repeats", COUNT, 3, "Number of turns of each kind.")
@option("--seconds", Number(0.01), 2.0, "Seconds of each turn.")
def command(
    report: Report, *, sessions: tuple[int, ...], tokens: tuple[int, ...], clients: tuple[int, ...], drafters: int,
    brokers: tuple[int, ...], database: str, journal: tuple[str, ...], repeats: int, seconds: float,
) -> None:  # fmt: skip
    """Send a broker on one core verdicts as fast as its clients receive the tokens, and count the tokens."""
    combined = product(sessions, tokens, clients, journal, brokers)
    kinds = [RateKind(s, t, c, drafters, j, b, database * (j != NO_JOURNAL)) for s, t, c, j, b in combined]
    if max(brokers) > 1 and not all(kind.database for kind in kinds):
        raise click.UsageError("several brokers need --database, and --journal full or process")
    report.update(settings={"repeats": repeats, "seconds": seconds})
    found: defaultdict[RateKind, list[dict[str, float]]] = defaultdict(list)
    for kind, measured in broker_rate(kinds, repeats, seconds, tell):
        found[kind].append(measured)
        figures = {f"{kind}: {name}": figure(unit, [one[name] for one in found[kind]]) for name, unit in UNITS.items()}
        report.update(figures=figures)
    rows: list[tuple[object, ...]] = [
        (
            "SESSIONS",
            "TOKENS",
            "CLIENTS",
            "DRAFTERS",
            "JOURNAL",
            "BROKERS",
            "TOKENS/S",
            "MESSAGES/S",
            "CORES",
            "US/TOKEN",
        )
    ]
    for kind, turns in found.items():
        rate, messages, busy, us = (median(one[name] for one in turns) for name in UNITS)
        about = kind.sessions, kind.tokens, kind.clients, kind.drafters, kind.journal, kind.brokers
        rows.append((*about, f"{rate:.0f}", f"{messages:.0f}", f"{busy:.2f}", f"{us:.1f}"))
    show(rows, ["medians; messages: those that clients received; cores: what the broker's process used"])


@dataclass(frozen=True, slots=True)
class RateKind:
    """A kind of measurement: sessions with `tokens` a step each, shared among `clients`.

    journal: its durability, or none.
    brokers: each has its own sessions, drafters and clients.
    database: the server of the journal. "": a file.
    """

    sessions: int
    tokens: int
    clients: int
    drafters: int
    journal: str
    brokers: int = 1
    database: str = ""

    def __str__(self) -> str:
        drafters = f", {self.drafters} drafters" if self.drafters else ""
        shared = f", {self.brokers} brokers on PostgreSQL" if self.database else ""
        of_each = f"{self.sessions} sessions x {self.tokens}, {self.clients} clients{drafters}"
        return f"{of_each}, journal {self.journal}{shared}"


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
    """Return the sums over all brokers, and the mean microseconds for a token."""
    cores = available_cores()
    with ExitStack() as stack:
        journal = _journal(kind, stack)
        asking = []
        for number in range(kind.brokers):
            broker, core = free_address(), cores[number % len(cores)]
            options = ("--bind", broker, "--cores", str(core), *QUIET, "--journal", *journal)
            pid = stack.enter_context(process("specq", "broker", *options)).pid
            of_load = (kind.sessions, kind.tokens, kind.clients, kind.drafters)
            others = cores[kind.brokers :] or cores
            load = Load(broker, pid, *of_load, seconds, 1, others, JOBS_APART * (number + 1))
            asking.append(stack.enter_context(process("bench.broker_load", arguments(load))))
        found = [json.loads(output(one, 2 * PATIENCE_S + 4 * seconds))[0] for one in asking]
    total = {name: sum(one[name] for one in found) for name in ("tokens", "messages", "busy")}
    return total | {"us": 1e6 * total["busy"] / total["tokens"]}


def _journal(kind: RateKind, stack: ExitStack) -> list[str]:
    """Return the options of a new journal: none, a file, or a database that is dropped in the end."""
    if kind.journal == NO_JOURNAL:
        return [NO_JOURNAL]
    if not kind.database:
        return [str(Path(stack.enter_context(TemporaryDirectory())) / "journal"), "--durability", kind.journal]
    return [stack.enter_context(new_database(kind.database)), "--durability", kind.journal]


@contextmanager
def new_database(server: str) -> Iterator[str]:
    """Create a database beside the one at an address, yield its address, and drop it."""
    import psycopg  # of an extra

    name = f"specq_bench_{secrets.token_hex(4)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
        try:
            yield urlsplit(server)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
