"""How long a level of chains takes: measured at start-up, for some numbers of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from specq.drafting.draft_model.interface import ChainSource
from specq.protocol import Int32Array, SamplingParams

CONTEXT = 32  # tokens
REPEATS = 3


def level_times(source: ChainSource, sizes: Sequence[int], depth: int, widths: Collection[int]) -> list[float]:
    """Return the seconds that a level of chains `depth` deep takes for so many sessions; chains of all these widths are run
    once, so that nothing is compiled for them in service."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> Int32Array:
        return random.integers(0, source.info.num_tokens, count, np.int32)

    ids = [-1 - i for i in range(max(sizes))]  # real sessions have ids >= 0
    try:
        for session_id in ids:
            source.open(session_id, tokens(CONTEXT), SamplingParams())
        seconds = []
        for size in sizes:
            for width in widths:
                _draft_s(source, ids[:size], tokens, depth, width)
            seconds.append(min(_draft_s(source, ids[:size], tokens, depth, 1) for _ in range(REPEATS)) / depth)
    finally:
        for session_id in ids:
            source.close(session_id)
    return seconds


def _draft_s(
    source: ChainSource, session_ids: Sequence[int], tokens: Callable[[int], Int32Array], depth: int, width: int
) -> float:
    """Return the seconds of one draft after contexts that have got a token more, as in service: what follows one that is as it was may be
    known from the draft before."""
    count = len(session_ids)
    source.commit(session_ids, np.ones(count, np.intp), tokens(count))
    started = time.perf_counter()
    source.start(session_ids, depth, width)
    source.finish()
    return time.perf_counter() - started
