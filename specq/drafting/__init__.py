"""Drafting: one folder a method, and a draft worker's core.

    interface            what a draft worker needs of whatever drafts
    table                the drafters that a draft worker can be given
    worker/              which nodes a draft worker expands and sends
    draft_model/, parallel/, medusa/, eagle3/, suffix/, lookahead/, vllm/   the methods
    vocabulary/          any of them for a target with another tokenizer
    paths                nodes of drafters that keep nothing else of them than tokens
    head_files, rank_trees   what Medusa and EAGLE-3 heads share: their files, the trees that they draft

A method has up to three parts: `spec`, a drafter for draft workers, by name in `PROPOSERS`; `source`, what drafts
inside a verifier, by name in `specq.verifier.SOURCES`; and what both compute with. The draft worker keeps each
session's tree and decides *which* nodes to expand; a drafter only says what follows a node. To add one: a folder with a
class that fulfils `Proposer`, a `ProposerSpec` of it, and one line in `PROPOSERS`; another package adds an entry point
of the group `specq.drafters` instead. tests/drafting/ runs over the table.
"""

from __future__ import annotations

from specq.drafting.interface import (
    CONTEXT,
    ActivationReader,
    ChainProposer,
    Children,
    Expansion,
    Proposer,
    ProposerSpec,
    chain_by_passes,
    draws_children,
    expand_chain,
    level_ids,
)
from specq.drafting.table import PROPOSERS
from specq.drafting.vocabulary import SAME, bridge

__all__ = [
    "CONTEXT",
    "PROPOSERS",
    "SAME",
    "ActivationReader",
    "ChainProposer",
    "Children",
    "Expansion",
    "Proposer",
    "ProposerSpec",
    "bridge",
    "chain_by_passes",
    "draws_children",
    "expand_chain",
    "level_ids",
]
