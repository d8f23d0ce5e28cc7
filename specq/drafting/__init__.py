"""Drafting: one folder for each method, and the core of a draft worker.

    interface            the interface of all drafters: `Drafter`
    table                the methods, by name
    former               support for packages written for the previous version
    worker/              which nodes a draft worker expands and sends
    draft_model/, parallel/, medusa/, eagle3/, suffix/, lookahead/, vllm/   the methods
    vocabulary/          any drafter for a target with another tokenizer
    paths                nodes of drafters that keep only the tokens of a node
    trees/               heads that draft whole trees from the target's hidden states
    head_files, rank_trees   what all heads share: their files, and the shapes of trees
    speculators_form     the files of the library `speculators`, of several methods

A method has up to three parts. A drafter with its `DrafterSpec` serves draft workers. A source drafts inside a verifier
(`specq.verifier.DraftSource`). The third part is the computation that both use. The draft worker keeps each session's
tree and decides *which* nodes to expand. A drafter only predicts what follows a node.

To add a method: create a folder with a class derived from `Drafter` and a `DrafterSpec` for it, and add one line to
`METHODS`. Another package adds an entry point of the group `specq.drafters` instead. tests/drafting/ runs over the
table. A source's name, lane and description for users are in `specq.protocol.origins`.
"""

from __future__ import annotations

from specq.drafting.former import as_drafter
from specq.drafting.interface import (
    CONTEXT,
    NO_CHILDREN,
    ChainDrafter,
    Chains,
    Children,
    Drafter,
    Expansion,
    Pending,
    draws_children,
    level_ids,
)
from specq.drafting.table import DRAFTERS, METHODS, SOURCES, DrafterSpec, make_sources
from specq.drafting.vocabulary import SAME, bridge

PROPOSERS, Proposer, ProposerSpec = DRAFTERS, Drafter, DrafterSpec  # their names in the previous version

__all__ = [
    "CONTEXT",
    "DRAFTERS",
    "METHODS",
    "NO_CHILDREN",
    "PROPOSERS",
    "SAME",
    "SOURCES",
    "ChainDrafter",
    "Chains",
    "Children",
    "Drafter",
    "DrafterSpec",
    "Expansion",
    "Pending",
    "Proposer",
    "ProposerSpec",
    "as_drafter",
    "bridge",
    "draws_children",
    "level_ids",
    "make_sources",
]
