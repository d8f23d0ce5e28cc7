"""What masks add to a verifier's step: steps of sessions with grammars and of sessions without, in turns.

    python -m bench.grammars.step_cost --model smollm2 --sessions 1 --sessions 8 --sessions 64 --out step_cost.json

One engine serves both, plain decoding, one row for each session. Wall time and processor time of a step are medians.
A ratio is the median of the ratios of neighbouring steps, since other processes may load the machine. `masks` is the
time of `StepMasks` and of writing them into the logits, a part of the step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import numpy as np

from bench.grammars.forms import FORMS
from bench.grammars.parts import OBJECTS
from specq.engines import Engine
from specq.engines.torch.engine import TorchEngine
from specq.grammar import GrammarBuilder
from specq.models import resolve_model
from specq.protocol import Int32Array, Open, SamplingParams, Speculation, grammar_text
from specq.runtime.machine import describe
from specq.text import load_tokenizer_files
from specq.verification import masking
from specq.verifier import StepCurve, Verifier

PROMPT = np.arange(100, 116, dtype=np.int32)
MOST_TOKENS = 1_900
KV_SLOTS = 80_000
Clock = Callable[[], float]


def endless(number: int) -> str:
    """Return a grammar whose text does not end: a long list of objects."""
    name = list(OBJECTS)[number % len(OBJECTS)]
    items = FORMS["arguments"](name, name)
    return grammar_text({"json_schema": {"type": "array", "items": items, "minItems": 200}})


def opening(session_id: int, prompt: Int32Array, params: SamplingParams, mode: str = "plain") -> Open:
    """Return the message that opens a session with a prompt i32[n], with as many tokens left as `params` allows."""
    assert params.max_tokens is not None
    return Open(
        session_id=session_id, epoch=1, prompt_len=len(prompt), tokens_left=params.max_tokens, params=params,
        speculation=Speculation(mode=mode), token_ids=prompt,
    )  # fmt: skip


def wait_for_grammars(verifier: Verifier) -> None:
    """Wait until the grammars of all open sessions are built."""
    while verifier.grammars.num_waiting:
        failed = verifier.take_grammars()
        assert not failed, failed
        time.sleep(0.002)


class Side:
    """A verifier with sessions that decode plainly, with or without grammars."""

    def __init__(self, engine: Engine, files: dict[str, str], ids: Iterator[int]) -> None:
        info = engine.info
        self.builder = GrammarBuilder(files, info.vocab_size, info.eos_ids)
        self.verifier = Verifier(
            engine, StepCurve([1, 64], [0.02, 0.2]), incarnation=1, tokenizer_files=files, grammar_builder=self.builder,
            max_uncommitted=2 * MOST_TOKENS,
        )  # fmt: skip
        self._ids = ids

    def add(self, num_sessions: int, *, has: bool) -> None:
        """Open sessions, and wait for their grammars, if they have any."""
        for number in range(num_sessions):
            own: dict[str, Any] = {"max_tokens": MOST_TOKENS, "temperature": 0.8, "seed": number, "ignore_eos": True}
            params = SamplingParams(**own, grammar=endless(number) if has else "")
            assert not self.verifier.handle(opening(next(self._ids), PROMPT, params), 0.0)
        wait_for_grammars(self.verifier)

    def step(self) -> tuple[float, float]:
        """Run a step; return its seconds of wall time and of processor time."""
        began, used = time.perf_counter(), time.process_time()
        for message in self.verifier.step(time.monotonic):
            assert not getattr(message, "reason", ""), message
        return time.perf_counter() - began, time.process_time() - used

    def close(self) -> None:
        for session_id in [*self.verifier.sessions]:
            self.verifier.engine.close(session_id)
        self.builder.close()


@contextmanager
def timed_masks(spent: list[float]) -> Iterator[None]:
    """Note the seconds of each call that makes and applies masks, if there are any."""
    apply = masking.mask

    def timed(steps: Any, logits: Any) -> None:
        began = time.perf_counter()
        apply(steps, logits)
        if steps.batch.masks is not None:
            spent.append(time.perf_counter() - began)

    with patch("specq.verification.judge.mask", timed):
        yield


def measure(engine: Engine, files: dict[str, str], num_sessions: int, num_steps: int) -> dict[str, Any]:
    """Return the figures of one number of sessions."""
    ids = count(1)
    sides = [Side(engine, files, ids) for _ in range(2)]
    for has, side in enumerate(sides):
        side.add(num_sessions, has=bool(has))
    spent: list[float] = []
    found: list[list[tuple[float, float]]] = [[], []]
    with timed_masks(spent):
        for turn in range(num_steps + 3):
            for which in (0, 1) if turn % 2 else (1, 0):
                found[which].append(sides[which].step())
    for side in sides:
        side.close()
    free, own = (np.array(one[3:]) for one in found)  # [steps, wall and processor]
    return {
        "sessions": num_sessions,
        "steps": num_steps,
        "free_ms": 1e3 * median(free[:, 0]),
        "grammar_ms": 1e3 * median(own[:, 0]),
        "wall_ratio": median(own[:, 0] / free[:, 0]),
        "processor_ratio": median(own[:, 1] / free[:, 1]),
        "masks_ms": 1e3 * median(spent[3:]),
        "masks_share_of_free": median(spent[3:]) / median(free[:, 0]),
    }


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Target.")
@click.option("--sessions", multiple=True, type=int, default=(1, 8, 64), show_default=True, help="Numbers of sessions.")
@click.option("--steps", default=100, show_default=True, help="Steps of each side.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(model: str, sessions: tuple[int, ...], steps: int, out: Path | None) -> None:
    """Measure, and print a line for each number of sessions."""
    at = resolve_model(model, "target")
    engine, files = TorchEngine(at, device="cpu", kv_slots=KV_SLOTS), load_tokenizer_files(at)
    rows = []
    for number in sessions:
        rows.append(measure(engine, files, number, steps))
        click.echo(json.dumps({name: round(value, 4) for name, value in rows[-1].items()}))
    report = {"model": model, "vocabulary": engine.info.vocab_size, "load": os.getloadavg(), "steps": rows}
    if out is not None:
        out.write_text(json.dumps(describe() | report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
