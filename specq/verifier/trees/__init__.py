"""The draft trees of all sessions of a verifier.

draft_trees  sessions, lanes and nodes, and the operations on them; the interface for other modules.
arrays       the columns, and the operations in C (kernels/).
reference    the operations in plain Python; reference_graft, reference_choice and reference_commit explain one kind
             each.
"""

from specq.verifier.trees.arrays import MAX_END_IDS, MAX_LANES, MAX_LIVE_NODES, MAX_TABLE_SIZE, NONE
from specq.verifier.trees.draft_trees import NEXT_IDS, NO_LIMIT, DraftTrees, Grafted, Lane

__all__ = [
    "MAX_END_IDS",
    "MAX_LANES",
    "MAX_LIVE_NODES",
    "MAX_TABLE_SIZE",
    "NEXT_IDS",
    "NONE",
    "NO_LIMIT",
    "DraftTrees",
    "Grafted",
    "Lane",
]
