"""Which whole CUDA graphs exist beside vLLM's own, and which steps are padded for them. Pure.

Some of vLLM's attention backends can only be captured for equal query lengths. Then sessions get padding rows, so that
all have the same number of rows. A padding row is computed like a rejected draft token. It comes after its session's
tokens and is never judged. The next step writes its own KV in that place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specq.protocol import IntpArray
from specq.verification import StepBatch

# Rows of each session, and numbers of sessions, for which graphs are captured. A step takes the next larger of each.
LENGTHS = (2, 3, 4, 5, 6, 8, 12, 17)
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_EVEN_ROWS = 512  # most rows of such a graph

MIXED = 0  # key of graphs in which each session may have any number of rows
# Rows of a step for which such graphs are captured. A step takes the next larger.
MIXED_ROWS = (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, *range(512, 1025, 64))

# A step that is launched in pieces takes about twice the host time of a plain one. A few hundred more rows take about
# as much additional device time.
MOST_MORE_ROWS = 256

Graphs = Mapping[int, Sequence[int]]  # rows of each session, ascending -> numbers of sessions, ascending


def graphs_up_to(most_rows: int, most_sessions: int) -> dict[int, tuple[int, ...]]:
    """Return {rows per session: numbers of sessions} to capture, for steps within these limits."""
    counts = sorted({*COUNTS, most_sessions})
    found = {
        length: tuple(count for count in counts if count <= most_sessions and count * length <= most_rows)
        for length in LENGTHS
    }
    return {length: fitting for length, fitting in found.items() if fitting}


def mixed_up_to(most_rows: int) -> tuple[int, ...]:
    """Return the step sizes in rows to capture, with the largest, for any rows per session."""
    fitting = {size for size in (*MIXED_ROWS, most_rows) if size <= min(most_rows, MIXED_ROWS[-1])}
    return tuple(sorted(fitting - {0}))


def graph_rows(counts: Sequence[int], length: int, num_sessions: int) -> int:
    """Return the rows of the smallest graph for `num_sessions` sessions with `length` rows each. 0 if there is none."""
    return next((length * count for count in counts if count >= num_sessions), 0)


def row_counts(batch: StepBatch, length: int) -> IntpArray:
    """Return the rows of each session of a step, i64[n]: `length`, or without padding if that is 0."""
    return np.full_like(batch.sizes, length) if length else batch.sizes


def even_length(batch: StepBatch, graphs: Graphs) -> int:
    """Return the padded number of rows per session, with which a graph computes the step; 0: no padding.

    It is 0 for a step without drafts, with prompts, or with too many padding rows.
    """
    if not (graphs and len(batch.parents) and batch.are_judged and bool(np.all(batch.num_tokens == 1))):
        return 0
    most, num_rows = 1 + int(batch.num_nodes.max()), len(batch.token_ids)
    for length in sorted(length for length in graphs if length >= most):
        if even_rows := graph_rows(graphs[length], length, len(batch)):
            return length if even_rows <= num_rows + MOST_MORE_ROWS else 0
    return 0
