"""Proposers turn a context into draft nodes.

The draft worker keeps each session's tree and decides *which* nodes to expand; a proposer only says what follows a node.
To add one: a file with a class that fulfils `Proposer`, and one line in `PROPOSERS`; tests/proposers/ runs over the table.
"""

from __future__ import annotations

from specq.proposers.chains import ChainProposer, expand_chain, level_ids
from specq.proposers.interface import Children, Expansion, Proposer, draws_children
from specq.proposers.ngram_index import NgramIndex

PROPOSERS = {
    "draft-model": "specq.proposers.draft_model:DraftModel",
    "ngram": "specq.proposers.ngram:NgramProposer",
    "vllm": "specq.proposers.vllm_model:VllmModel",
}
MODEL_FREE = frozenset({"ngram"})  # those that draft from the text alone

__all__ = [
    "MODEL_FREE",
    "PROPOSERS",
    "ChainProposer",
    "Children",
    "Expansion",
    "NgramIndex",
    "Proposer",
    "draws_children",
    "expand_chain",
    "level_ids",
]
