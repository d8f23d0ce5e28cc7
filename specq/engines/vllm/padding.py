"""Which whole CUDA graphs there are beside vLLM's own; and which steps get rows that nobody asked for, so that all
sessions have as many, where vLLM's attention can be captured for such steps alone. Pure.

Such a row is computed like that of a drafted token which is rejected: it stands behind its session's tokens, is never
judged, and the next step writes its own KV in that place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specq.protocol import IntpArray
from specq.verification import StepBatch

# Rows of each session, and numbers of sessions, that graphs are captured for. A step takes the next larger of each.
LENGTHS = (2, 3, 4, 5, 6, 8, 12, 17)
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_EVEN_ROWS = 512  # of these graphs

MIXED = 0  # rows of each session where these have any number of rows
# Rows of a step of such sessions, that graphs are captured for. A step takes the next larger.
MIXED_ROWS = (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, *range(512, 1025, 64))

# A step that is launched in pieces takes about twice as long as a plain one, the host's time: as does one with some
# hundred rows more, the device's.
MOST_MORE_ROWS = 256

Graphs = Mapping[int, Sequence[int]]  # rows of each session, ascending -> numbers of sessions, ascending


def graphs_up_to(most_rows: int, most_sessions: int) -> dict[int, tuple[int, ...]]:
    """Return for which rows of each session, and numbers of sessions, graphs are captured where a step has at most so
    many."""
    counts = sorted({*COUNTS, most_sessions})
    found = {
        length: tuple(count for count in counts if count <= most_sessions and count * length <= most_rows)
        for length in LENGTHS
    }
    return {length: fitting for length, fitting in found.items() if fitting}


def mixed_up_to(most_rows: int) -> tuple[int, ...]:
    """Return for which rows of a step graphs are captured where it has at most so many, whichever session has how many:
    also for the largest."""
    fitting = {size for size in (*MIXED_ROWS, most_rows) if size <= min(most_rows, MIXED_ROWS[-1])}
    return tuple(sorted(fitting - {0}))


def graph_rows(counts: Sequence[int], length: int, num_sessions: int) -> int:
    """Return the rows of the smallest graph for sessions with so many rows each; 0: there is none."""
    return next((length * count for count in counts if count >= num_sessions), 0)


def row_counts(batch: StepBatch, length: int) -> IntpArray:
    """Return how many rows each session of a step has, i64[n]: so many, or as many as were asked for where `length` is
    0."""
    return np.full_like(batch.sizes, length) if length else batch.sizes


def even_length(batch: StepBatch, graphs: Graphs) -> int:
    """Return how many rows each session of a step shall have, at least as many as it has, so that a graph computes it;
    0: it stays as it is, since nothing is drafted, prompts are computed, or all that would be computed is too much
    more."""
    if not (graphs and len(batch.parents) and batch.are_judged and bool(np.all(batch.num_tokens == 1))):
        return 0
    most, num_rows = 1 + int(batch.num_nodes.max()), len(batch.token_ids)
    for length in sorted(length for length in graphs if length >= most):
        if even_rows := graph_rows(graphs[length], length, len(batch)):
            return length if even_rows <= num_rows + MOST_MORE_ROWS else 0
    return 0
