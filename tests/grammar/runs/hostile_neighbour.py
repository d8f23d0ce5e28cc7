"""How long a verifier's steps take while hostile grammars are tried, built and followed beside ordinary sessions.

    python -m tests.grammar.runs.hostile_neighbour --out hostile_neighbour.json

One verifier with 32 sessions of `tiny` that never end, half of them with a grammar. Windows with hostile jobs and calm
windows take turns. An interval is the wall time from the end of one step to the end of the next: what a session waits
for its next token. Those of calm windows show what the machine's other work costs.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.grammars.step_cost import KV_SLOTS, PROMPT, Side
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.protocol import Open, SamplingParams, SessionFailed, grammar_text
from specq.runtime.machine import describe
from specq.text import load_tokenizer_files
from specq.verifier import Verifier
from tests.grammar.hostile import HOSTILE

SESSIONS, STEPS = 16, 20  # of each kind; steps of a window
HOSTILE_TOKENS = 40


def submit(verifier: Verifier, session_id: int, grammar: dict[str, Any]) -> None:
    """Open a session with a hostile grammar."""
    params = SamplingParams(max_tokens=HOSTILE_TOKENS, temperature=0.8, seed=session_id, grammar=grammar_text(grammar))
    message = Open(
        session_id=session_id,
        epoch=1,
        prompt_len=len(PROMPT),
        tokens_left=HOSTILE_TOKENS,
        params=params,
        token_ids=PROMPT,
    )
    verifier.handle(message, time.monotonic())


@click.command()
@click.option("--windows", default=60, show_default=True, help="Number of windows, half of them calm.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(windows: int, out: Path | None) -> None:
    """Measure, and print the intervals of both kinds of windows."""
    at = resolve_model("tiny", "target")
    files, ids = load_tokenizer_files(at), count(1)
    engine = TorchEngine(at, device="cpu", kv_slots=KV_SLOTS)
    side = Side(engine, files, ids)
    side.add(SESSIONS, has=True)
    side.add(SESSIONS, has=False)
    verifier, others = side.verifier, {*side.verifier.sessions}
    hostile = cycle(HOSTILE.items())
    intervals: dict[bool, list[float]] = {False: [], True: []}
    ends, names, waiting = Counter[str](), dict[int, str](), set[int]()
    for window in range(windows):
        is_hostile = window % 2 == 1
        if is_hostile:
            for name, (grammar, _) in islice(hostile, 2):
                names[session_id := next(ids)] = name
                waiting.add(session_id)
                submit(verifier, session_id, grammar)
        last, num = time.perf_counter(), 0
        while num < STEPS or (is_hostile and waiting):  # a hostile window lasts until its jobs have ended
            found = [*verifier.take_grammars(), *verifier.step(time.monotonic)]
            now = time.perf_counter()
            intervals[is_hostile].append(now - last)
            last, num = now, num + 1
            for message in found:
                if message.session_id in names and (isinstance(message, SessionFailed) or message.finish):
                    waiting.discard(message.session_id)
                    is_refused = isinstance(message, SessionFailed)
                    ends[f"{names[message.session_id]}: {message.reason if is_refused else message.finish}"[:160]] += 1
                else:
                    assert not isinstance(message, SessionFailed), message
    assert others <= {*verifier.sessions}, "a neighbour has ended"
    side.close()
    report: dict[str, Any] = {("hostile" if kind else "calm"): summary(own) for kind, own in intervals.items()}
    report |= {"load": os.getloadavg(), "ends": ends}
    click.echo(json.dumps(report, indent=1))
    if out is not None:
        out.write_text(json.dumps(describe() | report, indent=1, ensure_ascii=False) + "\n", "utf-8")


def summary(intervals: list[float]) -> dict[str, float]:
    """Return the quantiles of intervals in milliseconds."""
    own = 1e3 * np.array(intervals)
    return {"steps": len(own), "p50": np.median(own), "p99": np.quantile(own, 0.99), "max": own.max()}


if __name__ == "__main__":
    main()
