"""How many tokens a second pass through a broker's process on one core, with many sessions: `bench.broker_load` asks for all it can.

A real broker on one core, its threads included; on the other cores one process that is verifier and clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.broker_load import PATIENCE_S, Load, arguments
from bench.processes import output, process
from specq.config import free_address
from specq.runtime import available_cores

NO_JOURNAL = "none"
# Heartbeats would be in the way of the measuring; nor are they missed.
QUIET = ("--liveness-ms", "600000", "--heartbeat-ms", "60000", "--log-level", "warning")


@dataclass(frozen=True, slots=True)
class Kind:
    """What is measured: sessions of `tokens` a step each, shared among `clients`; `journal`: its durability, or none."""

    sessions: int
    tokens: int
    clients: int
    drafters: int
    journal: str

    def __str__(self) -> str:
        drafters = f", {self.drafters} drafters" if self.drafters else ""
        return f"{self.sessions} sessions x {self.tokens}, {self.clients} clients{drafters}, journal {self.journal}"


def broker_rate(
    kinds: list[Kind], repeats: int, seconds: float, tell: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Kind, dict[str, float]]]:
    """Yield what each kind gave, in turns, `repeats` times: tokens and messages a second, cores that the broker used, and
    microseconds of them for a token. Raises EngineError if a token is lost or doubled."""
    for repeat in range(repeats):
        for kind in kinds[:: -1 if repeat % 2 else 1]:
            tell(f"{repeat + 1} of {repeats}: {kind}")
            yield kind, _measure(kind, seconds)


def _measure(kind: Kind, seconds: float) -> dict[str, float]:
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
