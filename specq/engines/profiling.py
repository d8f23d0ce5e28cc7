"""How long steps of an engine take: measured at start-up, on a few short sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from specq.engines.interface import Engine
from specq.protocol import Int32Array, SamplingParams, SessionStep, Tree

SESSIONS = 8
CONTEXT = 8  # tokens
REPEATS, LEAST_REPEATS = 7, 2
PATIENCE_S = 5.0  # after which no round begins but for the least that there must be


def step_times(engine: Engine, sizes: Sequence[int], settle: Callable[[], None] = lambda: None) -> list[float]:
    """Return the least seconds of a step with so many rows, of a few rounds over all sizes: what disturbs a measurement
    only ever adds to it. `settle` waits until the device has done what it was given. See `Engine.step_times`."""
    random = np.random.default_rng(0)  # contexts that no prefix cache knows
    started, rounds = time.monotonic(), list[list[float]]()
    while len(rounds) < LEAST_REPEATS or (len(rounds) < REPEATS and time.monotonic() < started + PATIENCE_S):
        rounds.append([_time_step(engine, size, random, settle) for size in sizes])
    return [min(times) for times in zip(*rounds, strict=True)]


def _time_step(engine: Engine, num_rows: int, random: np.random.Generator, settle: Callable[[], None]) -> float:
    """Return the seconds of a step with so many rows, divided among a few short sessions."""
    num_sessions = min(num_rows, SESSIONS)
    shares = [len(part) for part in np.array_split(np.arange(num_rows), num_sessions)]
    steps = [_profiled(-1 - i, rows, engine, random) for i, rows in enumerate(shares)]  # real sessions have ids >= 0
    try:
        for step, context in steps:
            engine.open(step.session_id, np.concatenate([context, step.token_ids]))
        engine.step([SessionStep(s.session_id, 0, context, SamplingParams(), judged=False) for s, context in steps])
        settle()
        started = time.perf_counter()
        engine.step([step for step, _ in steps])
        return time.perf_counter() - started
    finally:
        for step, _ in steps:
            engine.close(step.session_id)


def _profiled(
    session_id: int, num_rows: int, engine: Engine, random: np.random.Generator
) -> tuple[SessionStep, Int32Array]:
    """Return a decoding step of so many rows, as many of them nodes as the engine takes, and the context before it."""
    num_nodes = min(num_rows - 1, engine.max_chain or num_rows)
    parents = np.arange(num_nodes, dtype=np.int32) - 1 if engine.max_chain else np.full(num_nodes, -1, np.int32)
    tokens = random.integers(0, engine.info.vocab_size, CONTEXT - 1 + num_rows, np.int32)
    context, own = tokens[: CONTEXT - 1], tokens[CONTEXT - 1 : len(tokens) - num_nodes]
    tree = Tree(tokens[len(tokens) - num_nodes :], parents, np.zeros(num_nodes, np.float32))
    return SessionStep(session_id, len(context), own, SamplingParams(), tree), context
