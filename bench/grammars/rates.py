"""Constrained decoding beside free decoding, in tokens a second: the verifier of a configuration, without sockets.

    python -m bench.grammars.rates --engine vllm --model pair/target --sessions 1 --sessions 128 --out FILE

All sessions of a side begin together, have prompts of one length and decode plainly. Sides take turns. `mixed` has as
many free sessions beside the constrained ones, and is compared with twice as many free ones.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.grammars.step_cost import PROMPT, endless, opening, wait_for_grammars
from specq.config import TargetConfig
from specq.processes.target import build_verifier
from specq.protocol import (
    Int32Array,
    Int64Array,
    Message,
    SamplingParams,
    Verdict,
    Verdicts,
    encode,
    grammar_text,
)
from specq.runtime.machine import describe
from specq.transport import calm_collector
from specq.verifier import Verifier

LETTERS = grammar_text({"regex": "[a-z ]{2000}"})
MOST_SESSIONS = 256  # of one step


@dataclass
class SessionMix:
    """The sessions of one side, and what its turns showed."""

    name: str
    num_free: int
    num_constrained: int = 0
    regex: bool = False
    rates: list[float] = field(default_factory=list)  # tokens a second of each turn
    step_ms: list[float] = field(default_factory=list)  # of all turns
    mask_ms: float = 0.0

    def grammars(self) -> list[str]:
        """Return the grammar of each session; free ones have none."""
        own = [LETTERS if self.regex else endless(number) for number in range(self.num_constrained)]
        return [""] * self.num_free + own


def sides_of(num_sessions: int) -> list[SessionMix]:
    """Return the sides of a number of sessions."""
    sides = [
        SessionMix("free", num_sessions),
        SessionMix("schema", 0, num_sessions),
        SessionMix("regex", 0, num_sessions, regex=True),
    ]
    if 1 < num_sessions <= MOST_SESSIONS // 4:
        sides += [SessionMix("twice free", 2 * num_sessions), SessionMix("mixed", num_sessions, num_sessions)]
    return sides


def run(verifier: Verifier, side: SessionMix, ids: Iterator[int], num_tokens: int, temperature: float) -> None:
    """Serve the sessions of a side once. The time counts from the step after the last prompt.

    Of `mixed`, the free sessions count.
    """
    grammars, session_ids = side.grammars(), list[int]()
    for number, grammar in enumerate(grammars):
        session_ids.append(next(ids))
        params = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, seed=number, ignore_eos=True, grammar=grammar
        )
        prompt = (PROMPT + number).astype(np.int32)
        assert not verifier.handle(opening(session_ids[-1], prompt, params), 0.0)
    wait_for_grammars(verifier)
    last_counted = session_ids[(side.num_free or len(grammars)) - 1]
    began, counted, in_all = 0.0, 0, 0
    while verifier.has_work:
        step_began = time.perf_counter()
        verifier.begin(time.monotonic(), time.monotonic)
        for message in verifier.step(time.monotonic).packed():
            encode(message)
            who, each = tokens_of(message)
            in_all += int(each.sum())
            counted += int(each[who <= last_counted].sum()) if began else 0
        now = time.perf_counter()
        if began:
            side.step_ms.append(1e3 * (now - step_began))
        elif in_all >= len(grammars):
            began = now
    side.rates.append(counted / (time.perf_counter() - began))


def tokens_of(message: Message) -> tuple[Int64Array, Int32Array]:
    """Return the sessions of a verdict, or of many, and how many tokens each has got."""
    if isinstance(message, Verdicts):
        return message.session_ids, message.num_tokens
    assert isinstance(message, Verdict), message
    return np.array([message.session_id]), np.array([len(message.token_ids)], np.int32)


def measure(
    verifier: Verifier, num_sessions: int, turns: int, num_tokens: int, temperature: float, ids: Iterator[int]
) -> dict[str, Any]:
    """Return the figures of a number of sessions: for each side, its turns' rates and steps, and its ratio to free."""
    sides = sides_of(num_sessions)
    for turn in range(-1, turns):  # the first turn does not count
        for side in sides[:: 1 if turn % 2 else -1]:
            run(verifier, side, ids, num_tokens, temperature)
        if turn < 0:
            for side in sides:
                side.rates.clear()
                side.step_ms.clear()
    base = {side.name: side.rates for side in sides}
    base["mixed"] = [rate / 2 for rate in base.get("twice free", ())]
    found: dict[str, Any] = {"sessions": num_sessions, "temperature": temperature}
    for side in sides:
        to = base["mixed" if side.name == "mixed" else "free"]
        found[side.name] = {
            "tokens_per_s": [round(rate, 1) for rate in side.rates],
            "step_ms": [round(float(one), 3) for one in np.quantile(side.step_ms, (0.5, 0.9, 0.99))],
            "ratio": round(median(one / other for one, other in zip(side.rates, to, strict=True)), 4),
        }
    return found


@click.command()
@click.option("--model", required=True, help="Target: a name or a directory.")
@click.option("--engine", default="auto", show_default=True, help="Engine of the verifier.")
@click.option("--device", default="auto", show_default=True, help="Where the model runs.")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights.")
@click.option("--sessions", multiple=True, type=int, default=(1, 32, 128), show_default=True, help="Sessions.")
@click.option("--temperature", multiple=True, type=float, default=(0.0,), show_default=True, help="Temperature.")
@click.option("--turns", default=3, show_default=True, help="Turns of each side.")
@click.option("--tokens", default=160, show_default=True, help="Tokens of each session.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(
    sessions: Sequence[int], temperature: Sequence[float], turns: int, tokens: int, out: Path | None, **options: Any
) -> None:
    """Measure, and print a line for each number of sessions and temperature."""
    config = TargetConfig(**options, max_sessions=MOST_SESSIONS, drafts="always")
    verifier, ids, rows = build_verifier(config, "rates"), count(1), list[dict[str, Any]]()
    calm_collector()
    for degree in temperature:
        for number in sessions:
            rows.append(measure(verifier, number, turns, tokens, degree, ids))
            click.echo(json.dumps(rows[-1]))
            if out is not None:
                report = describe() | options | {"load": os.getloadavg(), "rows": rows}
                out.write_text(json.dumps(report), "utf-8")
    verifier.engine.shutdown()


if __name__ == "__main__":
    main()
