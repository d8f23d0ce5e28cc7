"""Trees that a head has grown (`specq.drafting.Grown`) as drafts: of each the likeliest nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.eagle3.interface import Grown
from specq.protocol import BoolArray
from specq.verifier.sources import NEXT_IDS, DraftBatch, Session


def batch_of_grown(grown: Grown, sessions: Sequence[Session], wanted: BoolArray, lane: int, least: float) -> DraftBatch:
    """Return the nodes that are wanted, bool[m, n], as drafts; with a node those above it must be. Scores are `least` at least."""
    places = np.cumsum(wanted, 1) - 1  # among the wanted
    parents = np.where(grown.parents < 0, -1, np.take_along_axis(places, np.maximum(grown.parents, 0), 1))
    return DraftBatch(
        sessions=sessions,
        lanes=lane,
        base_lens=[session.length for session in sessions],
        first_ids=NEXT_IDS,
        sizes=wanted.sum(1),
        token_ids=grown.token_ids[wanted],
        parent_ids=parents[wanted].astype(np.int32),
        scores=np.maximum(grown.scores[wanted], least),
    )
