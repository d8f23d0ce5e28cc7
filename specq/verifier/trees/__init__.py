"""The draft trees of all sessions of a verifier.

draft_trees     sessions, lanes and nodes, and what is done with them; what other modules use
arrays          the columns
compiled        the operations in C (kernels/); reference: the same in plain Python, of which graft, choice, select and
                commit explain
one kind of operation each
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
