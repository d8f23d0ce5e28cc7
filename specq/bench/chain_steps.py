"""Draft steps: chains that stay on the device, and single passes."""

from __future__ import annotations

import statistics
import time
from typing import Any, Protocol

import numpy as np

from specq.proposers import ChainProposer, Expansion, Proposer
from specq.protocol import SamplingParams

DEPTHS = (2, 10)


class ChainDrafter(Proposer, ChainProposer, Protocol):
    """A proposer that also drafts chains on its device."""


def measure(
    draft: ChainDrafter, num_sessions: int, *, context: int = 256, temperature: float = 0.0, width: int = 1
) -> dict[str, Any]:
    """Return milliseconds of a chain's step: the difference of two depths; and of whole calls."""
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=temperature, seed=3)
    for i in range(num_sessions):
        draft.open(i, rng.integers(10, 4000, context).astype(np.int32), params)
    times = {depth: _chain_ms(draft, num_sessions, depth, width) for depth in DEPTHS}
    one_pass = _pass_ms(draft, num_sessions, width)
    for i in range(num_sessions):
        draft.close(i)
    shallow, deep = DEPTHS
    return {
        "sessions": num_sessions, "context": context, "temperature": temperature, "width": width,
        "step_ms": round((times[deep] - times[shallow]) / (deep - shallow), 4),
        "chain_ms": {depth: round(ms, 3) for depth, ms in times.items()}, "one_pass_ms": round(one_pass, 3),
    }  # fmt: skip


def _chain_ms(draft: ChainDrafter, num_sessions: int, depth: int, width: int) -> float:
    ids = tuple(range(depth * width))
    times = []
    for _ in range(14):
        started = time.perf_counter()
        draft.expand_chain([Expansion(i, -1, ids) for i in range(num_sessions)], depth)
        times.append(time.perf_counter() - started)
        _commit(draft, num_sessions)
    return statistics.median(times[4:]) * 1e3


def _pass_ms(draft: ChainDrafter, num_sessions: int, width: int) -> float:
    times = []
    for _ in range(14):
        started = time.perf_counter()
        draft.expand([Expansion(i, -1, tuple(range(width))) for i in range(num_sessions)])
        times.append(time.perf_counter() - started)
        _commit(draft, num_sessions)
    return statistics.median(times[4:]) * 1e3


def _commit(draft: ChainDrafter, num_sessions: int) -> None:
    """Commit a verdict that rejects all: one pending token each, as after any correction."""
    for i in range(num_sessions):
        draft.commit(i, np.array([77], np.int32), [])
