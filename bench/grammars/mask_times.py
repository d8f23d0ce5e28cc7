"""How long masks take with the tokenizer of a folder: to load it, for a row, and for the sessions of a step.

    python -m bench.grammars.mask_times FOLDER --columns 152064 --end 151643 --end 151645 --out mask_times.json

All tokenizers follow the same texts: walks along the grammars with the tokens of `tiny`. Times are processor time, of
all threads, since other processes may load the machine; those of a step also wall time. `first`: a row at the start of
a text, before and after a matcher is warmed. `later`: each further row. `commit`: of one token.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.grammars.forms import api_schemas
from bench.grammars.step_cost import endless
from specq.grammar import GrammarTokenizer, SessionGrammar, StepMasks
from specq.grammar.building import Walk, build_matcher, drawn, warm
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.models import resolve_model
from specq.protocol import SamplingParams, SessionStep
from specq.runtime.machine import describe
from specq.text import TextCodec, load_tokenizer_files
from specq.verification import StepBatch

LIMITS = GrammarLimits()
NUM_BUILDS = 5
TEXT_STEPS, LONG_STEPS = 96, 500  # tokens of `tiny` in a walk
Times = dict[str, list[float]]


class Walker:
    """Writes texts that grammars allow, with the tokens of `tiny`."""

    def __init__(self) -> None:
        files = load_tokenizer_files(resolve_model("tiny", "target"))
        self._codec = TextCodec(files)
        self._tokenizer = build_tokenizer(files, 4096, (0,))
        ids = [self._tokenizer.ids(text) for text in ('"', '",', "}", "]", ",", "0", "a")]
        self._closers = [one[0] for one in ids if len(one) == 1]

    def text(self, grammar: str, seed: int, num_steps: int) -> str:
        """Return the text of a walk, up to its first character that is not whole."""
        walk = Walk((), self._closers, seed, num_steps)
        draw, matcher, found = walk.draw(), build_matcher(self._tokenizer, grammar, LIMITS), list[int]()
        while len(found) < num_steps and not matcher.is_stopped():
            token_ids = matcher.compute_ff_tokens()
            token_ids = token_ids or drawn(
                matcher.compute_bitmask(), walk.preferred if draw.random() < 0.5 else (), draw
            )
            if not token_ids or token_ids == [0] or not matcher.consume_tokens(token_ids):
                break
            found += token_ids
        return self._codec.decode(found).split("\ufffd")[0]


@contextmanager
def timed(spent: list[float], wall: list[float] | None = None) -> Iterator[None]:
    """Note the milliseconds of processor time, and of wall time."""
    began, used = time.perf_counter(), time.process_time()
    yield
    spent.append(1e3 * (time.process_time() - used))
    if wall is not None:
        wall.append(1e3 * (time.perf_counter() - began))


def summary(spent: Sequence[float]) -> dict[str, float]:
    return {"count": len(spent), "median_ms": median(spent), "99_ms": float(np.quantile(spent, 0.99))}


def rows(walker: Walker, tokenizer: GrammarTokenizer, ends: tuple[int, ...]) -> dict[str, Any]:
    """Return the times of single rows, along a text of each schema."""
    spent: Times = {name: [] for name in ("build", "first, cold", "warm", "first", "later", "commit")}
    for seed, (_, schema) in enumerate(api_schemas()):
        grammar = json.dumps({"json_schema": schema})
        token_ids = tokenizer.ids(walker.text(grammar, seed, TEXT_STEPS))
        cold = SessionGrammar(build_matcher(tokenizer, grammar, LIMITS), tokenizer.inner, ends)
        words = np.zeros((1, cold.num_words), np.int32)
        with timed(spent["first, cold"]):
            cold.fill((), (), words)
        with timed(spent["build"]):
            matcher = build_matcher(tokenizer, grammar, LIMITS)
        with timed(spent["warm"]):
            warm(tokenizer, grammar, matcher)
        own = SessionGrammar(matcher, tokenizer.inner, ends)
        for at, token in enumerate(token_ids):
            if own.has_ended:
                break
            with timed(spent["later" if at else "first"]):
                own.fill((), (), words)
            with timed(spent["commit"]):
                own.commit([token])
    return {name: summary(one) for name, one in spent.items()}


def steps(
    walker: Walker, tokenizer: GrammarTokenizer, ends: tuple[int, ...], num_sessions: int, num_steps: int
) -> dict[str, Any]:
    """Return the times of the masks of steps, one row for each session."""
    params = SamplingParams(max_tokens=1_000)
    last, grammars, texts = np.array([5], np.int32), dict[int, SessionGrammar](), dict[int, list[int]]()
    for number in range(num_sessions):
        grammar = endless(number)
        matcher = build_matcher(tokenizer, grammar, LIMITS)
        warm(tokenizer, grammar, matcher)
        grammars[number] = SessionGrammar(matcher, tokenizer.inner, ends)
        texts[number] = tokenizer.ids(walker.text(grammar, number, LONG_STEPS))
    batch = StepBatch.of([SessionStep(one, 0, last, params=params, judged=True) for one in grammars]).judged()
    used, wall, commits = list[float](), list[float](), list[float]()
    num_steps = min(num_steps, *map(len, texts.values()))
    for at in range(num_steps):
        with timed(used, wall):
            StepMasks(grammars).of(batch)
        with timed(commits):
            for one, own in grammars.items():
                own.commit([texts[one][at]])
    return {
        "sessions": num_sessions, "first_ms": used[0], "processor": summary(used[1:]), "wall": summary(wall[1:]),
        "commits": summary(commits),
    }  # fmt: skip


@click.command()
@click.argument("folder")
@click.option("--columns", type=int, default=49_152, show_default=True, help="Columns of the model's logits.")
@click.option(
    "--end", "ends", multiple=True, type=int, default=(0, 2), show_default=True, help="Tokens that end texts."
)
@click.option("--sessions", multiple=True, type=int, default=(1, 8, 32, 64), show_default=True, help="In a step.")
@click.option("--steps", "num_steps", default=200, show_default=True, help="Steps of each number of sessions, at most.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(
    folder: str, columns: int, ends: tuple[int, ...], sessions: tuple[int, ...], num_steps: int, out: Path | None
) -> None:
    """Measure with the tokenizer in FOLDER, or of a bundled model."""
    files = load_tokenizer_files(folder if Path(folder).is_dir() else resolve_model(folder, "target"))
    walker, builds = Walker(), list[float]()
    for _ in range(NUM_BUILDS):
        with timed(builds):
            tokenizer = build_tokenizer(files, columns, ends)
    report: dict[str, Any] = {"columns": columns, "tokenizer": summary(builds), "load": os.getloadavg()}
    report["rows"] = rows(walker, tokenizer, ends)
    click.echo(json.dumps(report, indent=1))
    report["steps"] = []
    for number in sessions:
        report["steps"].append(steps(walker, tokenizer, ends, number, num_steps))
        click.echo(json.dumps(report["steps"][-1]))
    if out is not None:
        out.write_text(json.dumps(describe() | report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
