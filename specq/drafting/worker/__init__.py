"""A draft worker's sessions, what it drafts for each session, and its scores' reliability.

    worker                  verdicts in, drafts out, one drafter inside
    session, draft_nodes    the committed context and the nodes drafted beyond it; how nodes become a message; measured
                            acceptance over all sessions
    shapes                  how many children each node of a tree gets

In: Assign, Release, Verdict, Verdicts. Out: Draft. To add a way to draft: a `Drafter` (`specq.drafting`).
"""

from specq.drafting.worker.draft_nodes import LEAST_CHANCE
from specq.drafting.worker.session import SIBLING_VALUE, drafting_params
from specq.drafting.worker.shapes import BestFirst, DraftShape, Path, shape_of
from specq.drafting.worker.worker import DraftWorker

__all__ = [
    "LEAST_CHANCE",
    "SIBLING_VALUE",
    "BestFirst",
    "DraftShape",
    "DraftWorker",
    "Path",
    "drafting_params",
    "shape_of",
]
