"""What a verify step takes with the vllm engine, and whether its text is the torch engine's.

    python scripts/vllm_steps.py --model DIRECTORY --sessions 1,8,32,64 --drafts 0,4,8 --out vllm_steps.json

Medians in milliseconds, of steps of so many sessions with contexts of random tokens, each with a chain of random drafts.
With `--compare` the torch engine runs the same greedy texts afterwards, on the same device; near-ties may differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from specq.cli.options import core_list
from specq.config.engine_options import parsed
from specq.engines import Engine
from specq.engines.vllm.engine import VllmEngine
from specq.models import resolve_model
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep, Tree

GREEDY = SamplingParams(ignore_eos=True)
WARM = SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)


class Texts:
    """Some sessions with contexts of random tokens, in one engine."""

    def __init__(self, engine: Engine, count: int, context: int, params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.rng = np.random.default_rng(count)
        vocab = engine.info.num_tokens
        self.tokens = [self.rng.integers(0, vocab, context).tolist() for _ in range(count)]
        for i, tokens in enumerate(self.tokens):
            start = engine.open(i, np.array(tokens, np.int32))
            engine.step([SessionStep(i, start, np.array(tokens[start:], np.int32)[:-1], params, judged=False)])
        self.kv = [context - 1] * count

    def step(self, num_drafts: int) -> float:
        """Run one step, with so many random drafts a session; return its seconds."""
        drafts = [self._chain(num_drafts) for _ in self.tokens]
        steps = [
            SessionStep(i, kv, np.array(tokens[kv:], np.int32), self.params, tree)
            for i, (tokens, kv, tree) in enumerate(zip(self.tokens, self.kv, drafts, strict=True))
        ]
        started = time.perf_counter()
        judgements = self.engine.step(steps)
        seconds = time.perf_counter() - started
        for i, judgement in enumerate(judgements):
            self.kv[i] += 1 + len(judgement.path)
            self.tokens[i] += judgement.token_ids.tolist()
        return seconds

    def _chain(self, count: int) -> Tree:
        if not count:
            return NO_TREE
        tokens = self.rng.integers(0, self.engine.info.num_tokens, count).astype(np.int32)
        return Tree(tokens, np.arange(count, dtype=np.int32) - 1, np.zeros(count, np.float32))

    def close(self) -> None:
        for i in range(len(self.tokens)):
            self.engine.close(i)


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Return the median milliseconds of each kind of step."""
    found = {}
    for name, params in (("greedy", GREEDY), ("sampled", WARM)):
        for count in options.sessions:
            texts = Texts(engine, count, options.context, params)
            for num_drafts in options.drafts:
                times = [texts.step(num_drafts) for _ in range(options.repeats)]
                found[f"{name} S={count} K={num_drafts}"] = round(statistics.median(times[3:]) * 1e3, 3)
            texts.close()
    return found


def greedy_texts(engine: Engine, options: argparse.Namespace) -> list[list[int]]:
    """Return a few greedy continuations, with random drafts."""
    texts = Texts(engine, 4, options.context, GREEDY)
    while min(map(len, texts.tokens)) < options.context + 48:
        texts.step(4)
    texts.close()
    return [tokens[options.context :][:48] for tokens in texts.tokens]


def compare(ours: list[list[int]], model: str, options: argparse.Namespace) -> int:
    """Return how many greedy texts differ from the torch engine's."""
    from specq.engines.torch.engine import TorchEngine

    theirs = greedy_texts(TorchEngine(model, device=options.device, dtype=options.dtype, kv_slots=1 << 14), options)
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sessions", type=core_list, default=(1, 8))
    parser.add_argument("--drafts", type=core_list, default=(0, 4, 8))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--engine-option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    model = resolve_model(options.model, "target")
    started = time.perf_counter()
    engine = VllmEngine(
        model, device=options.device, dtype=options.dtype, options=parsed(options.engine_option), max_step_rows=2048
    )
    report: dict[str, Any] = {
        "model": options.model,
        "dtype": engine.info.dtype,
        "kv_slots": engine.info.kv_slots,
        "start_s": round(time.perf_counter() - started, 1),
        "step_ms": measure(engine, options),
    }
    texts = greedy_texts(engine, options) if options.compare else []
    engine.shutdown()
    if options.compare:
        report["greedy_texts_that_differ_of_4"] = compare(texts, model, options)
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
