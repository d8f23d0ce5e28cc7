"""Draft steps: chains that stay on the device, and single passes."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from specq.proposers import Expansion, Proposer, expand_chain
from specq.protocol import SamplingParams

SHALLOW, DEEP = 2, 10  # levels of the chains that are timed
WARM_UP, REPEATS = 4, 10


def measure(draft: Proposer, num_sessions: int, *, context: int = 256, width: int = 1) -> dict[str, Any]:
    """Return milliseconds of greedy chains, of a step in a chain (the difference of two depths), and of a single pass: medians."""
    rng = np.random.default_rng(1)
    for i in range(num_sessions):
        draft.open(i, rng.integers(10, 4000, context).astype(np.int32), SamplingParams(seed=3))
    one_pass, shallow, deep = (_call_ms(draft, num_sessions, depth, width) for depth in (1, SHALLOW, DEEP))
    for i in range(num_sessions):
        draft.close(i)
    return {
        "sessions": num_sessions, "context": context, "width": width,
        "step_ms": round((deep - shallow) / (DEEP - SHALLOW), 4),
        "chain_ms": {SHALLOW: round(shallow, 3), DEEP: round(deep, 3)}, "one_pass_ms": round(one_pass, 3),
    }  # fmt: skip


def _call_ms(draft: Proposer, num_sessions: int, depth: int, width: int) -> float:
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
    return median(found[WARM_UP:])
