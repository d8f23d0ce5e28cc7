"""The time of a verify step with an engine.

Steps use the engine's interface: sessions with contexts of random tokens, each with a chain of random drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from specq.engines import Engine, prefill
from specq.protocol import NO_TREE, SamplingParams, SessionStep, Tree

GREEDY = SamplingParams(ignore_eos=True)
KINDS = {"greedy": GREEDY, "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)}
WARM_UP = 3  # steps that are not counted


class Texts:
    """Sessions with contexts of random tokens, in one engine."""

    def __init__(self, engine: Engine, count: int, context: int, params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.rng = np.random.default_rng(count)
        vocab = engine.info.num_tokens
        self.tokens = [self.rng.integers(0, vocab, context).tolist() for _ in range(count)]
        for i, tokens in enumerate(self.tokens):
            prefill(engine, [(i, np.array(tokens, np.int32), context - 1)])
        self.kv = [context - 1] * count

    def step(self, num_drafts: int) -> float:
        """Run one step, with `num_drafts` random drafts in each session; return its seconds."""
        drafts = [self._draft(num_drafts) for _ in self.tokens]
        steps = [
            SessionStep(i, kv, np.array(tokens[kv:], np.int32), self.params, tree)
            for i, (tokens, kv, tree) in enumerate(zip(self.tokens, self.kv, drafts, strict=True))
        ]
        started = time.perf_counter()
        judgements = self.engine.step(steps).judgements
        seconds = time.perf_counter() - started
        for i, judgement in enumerate(judgements):
            self.kv[i] += 1 + len(judgement.path)
            self.tokens[i] += judgement.token_ids.tolist()
        return seconds

    def _draft(self, count: int) -> Tree:
        if not count:
            return NO_TREE
        tokens = self.rng.integers(0, self.engine.info.num_tokens, count).astype(np.int32)
        parents = np.arange(-1, count - 1, dtype=np.int32)
        return Tree(tokens, parents, np.zeros(count, np.float32))

    def close(self) -> None:
        """Close the sessions."""
        for i in range(len(self.tokens)):
            self.engine.close(i)


def measure(
    engine: Engine, sessions: Sequence[int], drafts: Sequence[int], context: int, repeats: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield each kind of step and the milliseconds of its repetitions, after some that are not counted."""
    for (name, params), count in product(KINDS.items(), sessions):
        texts = Texts(engine, count, context, params)
        for num_drafts in drafts:
            times = [texts.step(num_drafts) for _ in range(WARM_UP + repeats)]
            yield f"{name} S={count} K={num_drafts} step", [1e3 * seconds for seconds in times[WARM_UP:]]
        texts.close()


def measure_prompts(
    engine: Engine, lengths: Sequence[int], sessions: Sequence[int], repeats: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield each kind of step with prompts and the milliseconds of its repetitions.

    A step computes the whole prompts of new sessions, `lengths` tokens each, and draws their first tokens.
    """
    rng = np.random.default_rng(1)
    for count, length in product(sessions, lengths):
        times = list[float]()
        for _ in range(WARM_UP + repeats):
            prompts = rng.integers(0, engine.info.num_tokens, (count, length)).astype(np.int32)
            steps = [SessionStep(i, engine.open(i, prompt), prompt, GREEDY) for i, prompt in enumerate(prompts)]
            started = time.perf_counter()
            engine.step(steps)
            times.append(1e3 * (time.perf_counter() - started))
            for i in range(count):
                engine.close(i)
        yield f"prompts S={count} N={length} step", times[WARM_UP:]


def greedy_steps(
    engine: Engine, sessions: Sequence[int], drafts: Sequence[int], context: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each kind of greedy step, warmed up, and a function that runs it once more.

    Call the function before the next kind is requested.
    """
    for count in sessions:
        texts = Texts(engine, count, context, GREEDY)
        for num_drafts in drafts:
            for _ in range(WARM_UP):
                texts.step(num_drafts)
            yield f"greedy S={count} K={num_drafts} step", partial(texts.step, num_drafts)
        texts.close()
