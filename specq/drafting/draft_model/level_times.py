"""Time the levels of a draft model's chains, by the number of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from specq.drafting.interface import ChainDrafter
from specq.protocol import Int32Array, SamplingParams

PROFILED_SESSIONS = (1, 2, 4, 8, 16, 32, 48, 64)
# Further sizes, where chains for a number of sessions are recorded on their first run.
RECORDED_SESSIONS = (96, 128, 160, 192, 224, 256)
PROFILED_CONTEXT = 32  # tokens
REPEATS = 3


def profiled_sessions(max_sessions: int, *, is_recorded: bool = False) -> list[int]:
    """Return the numbers of sessions for timed levels. `is_recorded`: the first run of a size is recorded."""
    most = min(max_sessions, RECORDED_SESSIONS[-1])
    profiled = {*PROFILED_SESSIONS, *RECORDED_SESSIONS, most} if is_recorded else PROFILED_SESSIONS
    return sorted(sessions for sessions in profiled if sessions <= most)


def level_times(chains: ChainDrafter, sizes: Sequence[int], depth: int, widths: Collection[int]) -> list[float]:
    """Return the seconds that a level of chains `depth` deep takes, for each number of sessions in `sizes`.

    Chains of all these widths are run once, so that no compilation happens in service.
    """
    random = np.random.default_rng(0)

    def tokens(count: int) -> Int32Array:
        return random.integers(0, chains.info.num_tokens, count, np.int32)

    ids = [-1 - i for i in range(max(sizes))]  # real sessions have ids >= 0
    try:
        for session_id in ids:
            chains.open(session_id, tokens(PROFILED_CONTEXT), SamplingParams())
        seconds = []
        for size in sizes:
            for width in widths:
                _draft_s(chains, ids[:size], tokens, depth, width)
            seconds.append(min(_draft_s(chains, ids[:size], tokens, depth, 1) for _ in range(REPEATS)) / depth)
    finally:
        for session_id in ids:
            chains.close(session_id)
    return seconds


def _draft_s(
    chains: ChainDrafter, session_ids: Sequence[int], tokens: Callable[[int], Int32Array], depth: int, width: int
) -> float:
    """Return the seconds of one draft after contexts that grew by a token, as in service.

    With an unchanged context, the result may be known from the draft before.
    """
    count = len(session_ids)
    chains.commit(session_ids, np.ones(count, np.intp), tokens(count))
    started = time.perf_counter()
    chains.start(session_ids, depth, width).collect()
    return time.perf_counter() - started
