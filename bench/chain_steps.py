"""Draft steps: chains that stay on the device, and single passes."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from specq.drafting import Expansion, Proposer, expand_chain
from specq.protocol import SamplingParams

SHALLOW, DEEP = 2, 10  # levels of the chains that are timed
WARM_UP, REPEATS = 4, 10


def measure(
    draft: Proposer, num_sessions: int, *, context: int = 256, temperature: float = 0.0, width: int = 1
) -> dict[str, Any]:
    """Return milliseconds of a chain's step, of whole chains, and of a single pass: medians of `times`."""
    found = times(draft, num_sessions, context=context, temperature=temperature, width=width)
    chain_ms = {depth: round(median(found[f"chain of {depth}"]), 3) for depth in (SHALLOW, DEEP)}
    return {
        "sessions": num_sessions, "context": context, "temperature": temperature, "width": width,
        "step_ms": round(median(found["step"]), 4), "chain_ms": chain_ms,
        "one_pass_ms": round(median(found["one pass"]), 3),
    }  # fmt: skip


def times(
    draft: Proposer, num_sessions: int, *, context: int = 256, temperature: float = 0.0, width: int = 1
) -> dict[str, list[float]]:
    """Return milliseconds of chains, of a single pass, and of a step in a chain: the difference of two depths."""
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=temperature, seed=3)
    for i in range(num_sessions):
        draft.open(i, rng.integers(10, 4000, context).astype(np.int32), params)
    shallow, deep = (_call_ms(draft, num_sessions, depth, width) for depth in (SHALLOW, DEEP))
    one_pass = _call_ms(draft, num_sessions, 1, width)
    for i in range(num_sessions):
        draft.close(i)
    steps = [(ms - median(shallow)) / (DEEP - SHALLOW) for ms in deep]
    return {f"chain of {SHALLOW}": shallow, f"chain of {DEEP}": deep, "one pass": one_pass, "step": steps}


def _call_ms(draft: Proposer, num_sessions: int, depth: int, width: int) -> list[float]:
    """Time calls for all sessions; each is followed by a verdict that rejects all: one pending token each, as after any
    correction."""
    requests = [Expansion(i, -1, tuple(range(depth * width))) for i in range(num_sessions)]
    found = []
    for _ in range(WARM_UP + REPEATS):
        started = time.perf_counter()
        expand_chain(draft, requests, depth)
        found.append(1e3 * (time.perf_counter() - started))
        for i in range(num_sessions):
            draft.commit(i, np.array([77], np.int32), [])
    return found[WARM_UP:]
