"""A draft worker's own work for a session and round, without its model and its sockets.

    python -m bench.draft_work [--sessions 64] [--fan-out 1] [--rounds 120] [--out FILE]

The model is a stub whose chains of six always have the same scores; its time is not counted. Each round the verdicts of
all sessions arrive as one message. They accept zero to six tokens of the chain, and a correction follows. Times are of
the thread, so other processes add little. The medians are of the rounds after the first WARM.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import numpy as np

from specq.drafting import Children, Drafter, Expansion
from specq.drafting.worker import DraftWorker
from specq.protocol import (
    Assign,
    Draft,
    Drafts,
    Frames,
    Int32Array,
    ModelInfo,
    SamplingParams,
    Verdicts,
    decode,
    encode,
)
from specq.runtime import columns
from specq.runtime.machine import describe

CHAIN = 6
PROMPT = 16  # tokens
CORRECTION = 1  # a token that is never drafted
WARM = 20
MIN_ACCEPT_PROB = 100


class StubChains(Drafter):
    """Drafts the same chain below every node. `seconds`: its own time."""

    has_chains = True

    def __init__(self, fan_out: int) -> None:
        self.info, self.seconds = ModelInfo("stub", "stub", "none", "stub", 100, 100, (), 10_000, ""), 0.0
        scores = np.log(np.array([0.8] + [0.1] * (fan_out - 1), np.float32))
        self.levels = [Children(np.arange(fan_out, dtype=np.int32) + 2 + 10 * i, scores) for i in range(CHAIN)]

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Keep nothing."""

    def close(self, session_id: int) -> None:
        """Forget nothing."""

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Follow nothing."""

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Return the first level."""
        return [self.levels[0] for _ in requests]

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        """Return the chain for each request."""
        started = time.thread_time()
        answers = [self.levels[:depth] for _ in requests]
        self.seconds += time.thread_time() - started
        return answers


def verdicts_on(drafts: Sequence[Draft], num_accepted: Int32Array) -> Frames:
    """Return the verdicts on drafts: so many tokens of each chain, and a correction. They verified each chain."""
    fan_out = len(drafts[0].token_ids) // CHAIN
    spine = np.arange(CHAIN, dtype=np.int32) * fan_out
    count, nothing = len(drafts), np.zeros(len(drafts), np.int32)
    token_ids = [
        [*draft.token_ids[spine[:num]], CORRECTION] for draft, num in zip(drafts, num_accepted.tolist(), strict=True)
    ]
    tokens = np.concatenate(token_ids).astype(np.int32)
    message = Verdicts(
        min_accept_prob=MIN_ACCEPT_PROB,
        session_ids=np.array([draft.session_id for draft in drafts]),
        epochs=np.ones(count, np.int64),
        base_lens=np.array([draft.base_len for draft in drafts], np.int32),
        num_tokens=num_accepted + 1,
        num_nodes=np.full(count, CHAIN, np.int32),
        num_seen=nothing,
        waited_us=nothing,
        token_ids=tokens,
        origins=np.zeros(len(tokens), np.uint8),
        node_ids=np.concatenate([draft.first_id + spine for draft in drafts]),
        mask=(np.arange(CHAIN) < num_accepted[:, None]).astype(np.uint8).reshape(-1),
        node_lanes=np.zeros(count * CHAIN, np.uint8),
    )
    return [bytes(frame) for frame in encode(message)]


def measure(sessions: int, fan_out: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds a session of each round, by part."""
    random, stub = np.random.default_rng(0), StubChains(fan_out)
    worker = DraftWorker(stub, incarnation=1, fan_out=fan_out, chain=CHAIN, max_ahead=CHAIN)
    params, prompt = SamplingParams(max_tokens=10 * CHAIN * (WARM + rounds)), np.full(PROMPT, CORRECTION, np.int32)
    for i in range(sessions):
        worker.handle(Assign(session_id=i, epoch=1, lane=0, prompt_len=PROMPT, params=params, token_ids=prompt))
    found: dict[str, list[float]] = {"draft": [], "encode": [], "hear": []}
    for number in range(WARM + rounds):
        stub.seconds, at = 0.0, [time.thread_time()]
        drafts = worker.step()
        at.append(time.thread_time())
        for message in Drafts.packed(drafts):
            encode(message)
        at.append(time.thread_time())
        frames = verdicts_on(drafts, random.integers(0, CHAIN + 1, sessions).astype(np.int32))
        arrived = time.thread_time()
        worker.handle(decode(frames))
        taken = at[1] - at[0] - stub.seconds, at[2] - at[1], time.thread_time() - arrived
        for own, seconds in zip(found.values(), taken, strict=True):
            if number >= WARM:
                own.append(round(1e6 * seconds / sessions, 2))
    return found


@click.command()
@click.option("--sessions", type=click.IntRange(1), default=(1, 64), show_default=True, multiple=True)
@click.option("--fan-out", type=click.IntRange(1, 8), default=(1, 3), show_default=True, multiple=True)
@click.option("--rounds", type=click.IntRange(1), default=120, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(sessions: tuple[int, ...], fan_out: tuple[int, ...], rounds: int, out: Path | None) -> None:
    """Measure, and print the medians in microseconds a session."""
    rows: list[tuple[object, ...]] = [("SESSIONS", "FAN-OUT", "DRAFT", "ENCODE", "HEAR", "SUM")]
    found = []
    for count in sessions:
        for width in fan_out:
            middle = {part: median(taken) for part, taken in measure(count, width, rounds).items()}
            found.append({"sessions": count, "fan_out": width, "us": middle})
            rows.append((count, width, *(f"{one:.1f}" for one in (*middle.values(), sum(middle.values())))))
    click.echo(columns(rows))
    if out is not None:
        out.write_text(json.dumps(describe() | {"load": os.getloadavg(), "found": found}), "utf-8")


if __name__ == "__main__":
    main()
