"""What broker and wire add to a drafted round of many sessions: their verdicts down, their drafts up.

    python -m bench.draft_rounds [--sessions 64] [--rounds 200] [--drafting-ms 2] [--out FILE]

A real broker in a process of its own; verifier, drafter and client are sockets of this one. Three ways, in turns:
drafts together in one message, drafts one by one, and together without a broker. A round ends when the verifier has
decoded all drafts; the drafter's own time (`--drafting-ms`) is subtracted. Rounds are PAUSE_S apart, since the broker
limits the share of a verifier's time that drafts may take.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import zmq

from bench.broker_load import FIRST_JOB, Load, Peers
from bench.deployments import process
from bench.suites.broker_rate import QUIET
from specq.config import free_address
from specq.protocol import Assign, Draft, Drafts, EngineError, Verdicts, decode, encode
from specq.runtime import columns
from specq.runtime.machine import describe
from specq.transport import bind_router, connect_dealer

NODES = 6
PAUSE_S = 0.02
WARM = 20  # rounds that do not count
PATIENCE_MS = 30_000


class Sides:
    """The two ends of a way: the verifier's socket, its peer there, and the drafter's socket."""

    def __init__(self, router: zmq.Socket[bytes], peer: bytes, drafter: zmq.Socket[bytes]) -> None:
        self.router, self.peer, self.drafter = router, peer, drafter

    def round(self, verdicts: list[bytes], drafts: list[Draft | Drafts], sessions: int, drafting_s: float) -> float:
        """Return the seconds of a round less the drafter's own. Raises EngineError if a message does not arrive."""
        started = time.perf_counter()
        self.router.send_multipart([self.peer, *verdicts])
        while not isinstance(_received(self.drafter), Verdicts):
            pass
        drafted = time.perf_counter() + drafting_s
        while time.perf_counter() < drafted:  # as a drafter, it works on a core of its own
            pass
        for draft in drafts:
            self.drafter.send_multipart(encode(draft))
        found = 0
        while found < sessions:
            message = _received(self.router, skip=1)
            found += len(message.session_ids) if isinstance(message, Drafts) else isinstance(message, Draft)
        return time.perf_counter() - started - drafting_s


def _received(socket: zmq.Socket[bytes], skip: int = 0) -> object:
    if not socket.poll(PATIENCE_MS):
        raise EngineError("a message did not arrive")
    return decode(socket.recv_multipart()[skip:])


def _drafts(assigned: list[Assign], base_len: int) -> list[Draft]:
    parents = np.arange(NODES, dtype=np.int32) - 1
    values: dict[str, Any] = {"base_len": base_len, "first_id": 0, "token_ids": parents + 100, "parent_ids": parents}
    scores = np.full(NODES, -0.5, np.float16)
    return [Draft(session_id=a.session_id, epoch=a.epoch, lane=a.lane, scores=scores, **values) for a in assigned]


def measure(sessions: int, rounds: int, drafting_s: float) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by way."""
    address, context = free_address(), zmq.Context[zmq.Socket[bytes]]()
    with process("specq", "broker", "--bind", address, *QUIET, "--journal", "none") as broker:
        try:
            peers = Peers(context, Load(address, broker.pid, sessions, 1, 1, 1, 0.0, 1, (), FIRST_JOB))
            drafter, assigned = peers.drafters[0], list[Assign]()
            while len(assigned) < sessions:
                if isinstance(message := _received(drafter), Assign):
                    assigned.append(message)
            router, endpoint = bind_router(context, "tcp://127.0.0.1:*")
            dealer = connect_dealer(context, endpoint, queue=True)
            dealer.send_multipart(encode(_drafts(assigned[:1], 1)[0]))
            direct = Sides(router, router.recv_multipart()[0], dealer)
            return _rounds(Sides(peers.router, peers.broker, drafter), direct, peers, assigned, rounds, drafting_s)
        finally:
            context.destroy(linger=0)


def _rounds(
    through: Sides, direct: Sides, peers: Peers, assigned: list[Assign], rounds: int, drafting_s: float
) -> dict[str, list[float]]:
    together: Callable[[list[Draft]], list[Draft | Drafts]] = Drafts.packed
    ways = {"together": (through, together), "one by one": (through, list), "without a broker": (direct, together)}
    found: dict[str, list[float]] = {way: [] for way in ways}
    verdicts = list[bytes]()
    for number in range(WARM + rounds):
        for way in list(ways)[:: -1 if number % 2 else 1]:
            sides, form = ways[way]
            if sides is through:  # the broker takes each verdict once
                verdicts = peers.steps.take()
            seconds = sides.round(verdicts, form(_drafts(assigned, number)), len(assigned), drafting_s)
            while peers.clients[0].poll(0):
                peers.clients[0].recv_multipart()
            if number >= WARM:
                found[way].append(round(1e3 * seconds, 4))
            time.sleep(PAUSE_S)
    return found


@click.command()
@click.option("--sessions", type=click.IntRange(1), default=(16, 64, 256), show_default=True, multiple=True)
@click.option("--rounds", type=click.IntRange(1), default=200, show_default=True)
@click.option("--drafting-ms", type=click.FloatRange(0), default=2.0, show_default=True, help="The drafter's own time.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(sessions: tuple[int, ...], rounds: int, drafting_ms: float, out: Path | None) -> None:
    """Measure, and print the medians in milliseconds."""
    rows: list[tuple[object, ...]] = [("SESSIONS", "TOGETHER", "ONE BY ONE", "WITHOUT A BROKER", "ADDED")]
    found = {}
    for count in sessions:
        found[count] = measure(count, rounds, drafting_ms / 1e3)
        middle = [median(taken) for taken in found[count].values()]
        rows.append((count, *(f"{one:.2f}" for one in middle), f"{middle[0] - middle[2]:.2f}"))
    click.echo(columns(rows))
    if out is not None:
        setting = {"load": os.getloadavg(), "drafting_ms": drafting_ms}
        out.write_text(json.dumps(describe() | setting | {"ms": found}), "utf-8")


if __name__ == "__main__":
    main()
