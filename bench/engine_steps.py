"""What a verify step takes with an engine, and whether two engines say the same.

Steps go through the engine's interface: sessions with contexts of random tokens, each with a chain or tree of random drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from specq.engines import Engine, prefill
from specq.protocol import NO_TREE, Int32Array, SamplingParams, SessionStep, Tree

GREEDY = SamplingParams(ignore_eos=True)
KINDS = {"greedy": GREEDY, "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)}
WARM_UP = 3  # steps that are not counted
NUM_TEXTS, TEXT_LEN = 4, 48
# The parent of each node, by the draft's shape; -1: the context.
PARENTS: dict[str, Callable[[int], int]] = {"chain": lambda node: node - 1, "tree": lambda node: node // 2 - 1}


class Texts:
    """Sessions with contexts of random tokens, in one engine."""

    def __init__(self, engine: Engine, count: int, context: int, params: SamplingParams, shape: str = "chain") -> None:
        self.engine, self.params, self.parent = engine, params, PARENTS[shape]
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
        parents = np.array([self.parent(node) for node in range(count)], np.int32)
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


def greedy_steps(
    engine: Engine, sessions: Sequence[int], drafts: Sequence[int], context: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each kind of greedy step, warmed up, and what runs it once more: before the next one is asked for."""
    for count in sessions:
        texts = Texts(engine, count, context, GREEDY)
        for num_drafts in drafts:
            for _ in range(WARM_UP):
                texts.step(num_drafts)
            yield f"greedy S={count} K={num_drafts} step", partial(texts.step, num_drafts)
        texts.close()


def measure_openings(
    engine: Engine, sessions: Sequence[int], context: int, repeats: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield the milliseconds of opening so many sessions, of contexts that the engine has seen before, of the step to their first tokens,
    and of closing them; of each repetition, after some that are not counted."""
    for count in sessions:
        texts = Texts(engine, count, context, GREEDY)
        contexts = [np.array(tokens, np.int32) for tokens in texts.tokens]
        texts.step(0)
        texts.close()
        times = [_begin(engine, contexts) for _ in range(WARM_UP + repeats)][WARM_UP:]
        for kind, seconds in zip(("open", "first step", "close"), zip(*times, strict=True), strict=True):
            yield f"{kind} S={count}", [1e3 * one for one in seconds]


def _begin(engine: Engine, contexts: Sequence[Int32Array]) -> tuple[float, float, float]:
    """Return the seconds of opening sessions with these contexts, of their first step, and of closing them."""
    began = time.perf_counter()
    starts = [engine.open(i, context) for i, context in enumerate(contexts)]
    opened = time.perf_counter()
    engine.step([SessionStep(i, starts[i], context[starts[i] :], GREEDY) for i, context in enumerate(contexts)])
    stepped = time.perf_counter()
    for i in range(len(contexts)):
        engine.close(i)
    return opened - began, stepped - opened, time.perf_counter() - stepped


def greedy_texts(engine: Engine, context: int) -> list[list[int]]:
    """Return a few greedy continuations, with random drafts."""
    texts = Texts(engine, NUM_TEXTS, context, GREEDY)
    while min(map(len, texts.tokens)) < context + TEXT_LEN:
        texts.step(4)
    texts.close()
    return [tokens[context:][:TEXT_LEN] for tokens in texts.tokens]
