"""Sessions beside a batch in the background: the verifier of a configuration, without sockets.

    python -m bench.background --model pair/target --others 8 --places 64 --out FILE

`others` sessions are always open, each behind the last one. A batch has `places` sessions, open at any time too. Turns
have the others alone, both, and the batch alone. Figures: seconds to the first token of the others and
between their tokens, and the tokens a second of both sides.

`allowed`: tokens a second that the step curve allows a batch beside the others, if steps may be MOST_SLOWDOWN times as
long, and a token takes a row and its part of the rows of a prompt.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.grammars.rates import tokens_of
from bench.grammars.step_cost import opening
from specq.config import TargetConfig
from specq.processes.target import build_verifier
from specq.protocol import Close, SamplingParams
from specq.runtime.machine import describe
from specq.transport import calm_collector
from specq.verifier import MOST_SLOWDOWN, Verifier


@dataclass
class SharedTurn:
    """What a turn showed: seconds of the others, and tokens."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_others: int = 0
    num_batch: int = 0

    def figures(self) -> dict[str, float]:
        """Return milliseconds and tokens a second."""
        found = {"others_per_s": self.num_others / self.seconds, "batch_per_s": self.num_batch / self.seconds}
        if self.between_s:
            found |= {
                "first_ms_p95": 1e3 * float(np.quantile(self.first_s, 0.95)),
                "between_ms_mean": 1e3 * float(np.mean(self.between_s)),
                "between_ms_p95": 1e3 * float(np.quantile(self.between_s, 0.95)),
                "between_ms_longest": 1e3 * float(np.max(self.between_s)),
            }
        return {name: round(value, 3) for name, value in found.items()}


class SharedLoad:
    """Sessions of the others and of the batch at one verifier."""

    def __init__(self, verifier: Verifier, prompt_len: int, num_tokens: int, ids: Iterator[int]) -> None:
        self._verifier, self._prompt_len, self._num_tokens, self._ids = verifier, prompt_len, num_tokens, ids
        self._rng = np.random.default_rng(1)
        self._began: dict[int, float] = {}  # of the others, by session
        self._last: dict[int, float] = {}
        self._in_batch: set[int] = set()

    def _open(self, *, is_background: bool) -> None:
        session_id = next(self._ids)
        # Sessions do not end together.
        most = int(self._rng.integers(self._num_tokens // 2, self._num_tokens + 1))
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        prompt = self._rng.integers(10, 4000, self._prompt_len).astype(np.int32)
        message = replace(opening(session_id, prompt, params), is_background=is_background)
        assert not self._verifier.handle(message, time.monotonic())
        if is_background:
            self._in_batch.add(session_id)
        else:
            self._began[session_id] = time.perf_counter()

    def serve(self, seconds: float, num_others: int, places: int) -> SharedTurn:
        """Serve for that long, and stop all sessions."""
        turn, began = SharedTurn(), time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            for _ in range(num_others - len(self._began)):
                self._open(is_background=False)
            for _ in range(places - len(self._in_batch)):
                self._open(is_background=True)
            self._step(turn)
        turn.seconds = now - began
        for session_id in [*self._began, *self._in_batch]:
            self._close(session_id)
        while self._verifier.has_work:
            self._verifier.step(time.monotonic)
        return turn

    def _step(self, turn: SharedTurn) -> None:
        verifier = self._verifier
        verifier.begin(time.monotonic(), time.monotonic)
        messages = list(verifier.step(time.monotonic).packed())
        now = time.perf_counter()
        for message in messages:
            for session_id, num in zip(*(one.tolist() for one in tokens_of(message)), strict=True):
                self._note(turn, session_id, num, now)

    def _note(self, turn: SharedTurn, session_id: int, num: int, now: float) -> None:
        if session_id in self._in_batch:
            turn.num_batch += num
        elif session_id in self._began:
            turn.num_others += num
            if session_id in self._last:
                turn.between_s.append((now - self._last[session_id]) / num)
            else:
                turn.first_s.append(now - self._began[session_id])
            self._last[session_id] = now
        session = self._verifier.sessions.get(session_id)
        if session is not None and session.finish:
            self._close(session_id)

    def _close(self, session_id: int) -> None:
        self._verifier.handle(Close(session_id=session_id, epoch=1), time.monotonic())
        self._began.pop(session_id, None)
        self._last.pop(session_id, None)
        self._in_batch.discard(session_id)


def measure(
    load: SharedLoad, verifier: Verifier, seconds: float, turns: int, others: int, places: int
) -> dict[str, Any]:
    """Return the figures of each side by turn, and the medians of their ratios."""
    sides = {"alone": (others, 0), "beside": (others, places), "batch": (0, places)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(-1, turns):  # the first turn does not count
        for name in [*sides][:: 1 if turn % 2 else -1]:
            figures = load.serve(seconds, *sides[name]).figures()
            if turn >= 0:
                found[name].append(figures)
    names = [name for name in found["alone"][0] if name != "batch_per_s"]
    pairs = list(zip(found["alone"], found["beside"], strict=True))
    ratios = {name: round(median(b[name] / a[name] for a, b in pairs), 4) for name in names}
    step_s, row_s = verifier.curve(others), (verifier.curve(others + places) - verifier.curve(others)) / places
    return {**found, "ratios": ratios, "curve": {"step_ms": 1e3 * step_s, "row_ms": 1e3 * row_s}}


@click.command()
@click.option("--model", required=True, help="Target: a name or a directory.")
@click.option("--engine", default="auto", show_default=True, help="Engine of the verifier.")
@click.option("--device", default="auto", show_default=True, help="Where the model runs.")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights.")
@click.option("--others", default=8, show_default=True, help="Sessions that are not in the background.")
@click.option("--places", default=64, show_default=True, help="Sessions of the batch.")
@click.option("--prompt", default=60, show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=128, show_default=True, help="Most tokens of each session; at least half as many.")
@click.option("--seconds", default=8.0, show_default=True, help="Seconds of a turn.")
@click.option("--turns", default=3, show_default=True, help="Turns of each side.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(
    others: int, places: int, prompt: int, tokens: int, seconds: float, turns: int, out: Path | None, **options: Any
) -> None:
    """Measure, and print the figures."""
    config = TargetConfig(**options, max_sessions=others + places)
    verifier = build_verifier(config, "background")
    calm_collector()
    load = SharedLoad(verifier, prompt, tokens, count(1))
    figures = measure(load, verifier, seconds, turns, others, places)
    curve, step_share = figures["curve"], (MOST_SLOWDOWN - 1) / MOST_SLOWDOWN
    row_s = curve["row_ms"] / 1e3 * (1 + prompt / (0.75 * tokens))
    figures["allowed_per_s"] = round(min(step_share / row_s, places / (MOST_SLOWDOWN * curve["step_ms"] / 1e3)), 1)
    click.echo(json.dumps(figures))
    if out is not None:
        report = describe() | options | {"load": os.getloadavg(), "others": others, "places": places} | figures
        out.write_text(json.dumps(report), "utf-8")
    verifier.engine.shutdown()


if __name__ == "__main__":
    main()
