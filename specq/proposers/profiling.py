"""How long a level of chains takes: measured at start-up, for some numbers of sessions."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from specq.proposers.chain_source import ChainSource
from specq.protocol import SamplingParams

CONTEXT = 32  # tokens
REPEATS = 3


def level_times(source: ChainSource, sizes: Sequence[int], depth: int, widths: Collection[int]) -> list[float]:
    """Return the seconds that a level of chains `depth` deep takes for so many sessions; chains of all these widths are run
    once, so that nothing is compiled for them in service."""
    random = np.random.default_rng(0)
    ids = [-1 - i for i in range(max(sizes))]  # real sessions have ids >= 0
    try:
        for session_id in ids:
            source.open(session_id, random.integers(0, source.info.vocab_size, CONTEXT, np.int32), SamplingParams())
        seconds = []
        for size in sizes:
            for width in widths:
                _draft_s(source, ids[:size], depth, width)
            seconds.append(min(_draft_s(source, ids[:size], depth, 1) for _ in range(REPEATS)) / depth)
    finally:
        for session_id in ids:
            source.close(session_id)
    return seconds


def _draft_s(source: ChainSource, session_ids: Sequence[int], depth: int, width: int) -> float:
    """Return the seconds of one draft after contexts that are computed."""
    started = time.perf_counter()
    source.start(session_ids, depth, width)
    source.finish()
    return time.perf_counter() - started
