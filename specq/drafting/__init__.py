"""Drafting: one folder a method, and a draft worker's core.

    interface            what drafts: `Drafter`
    table                the methods, by name
    former               what packages for the version before have instead
    worker/              which nodes a draft worker expands and sends
    draft_model/, parallel/, medusa/, eagle3/, suffix/, lookahead/, vllm/   the methods
    vocabulary/          any drafter for a target with another tokenizer
    paths                nodes of drafters that keep nothing else of them than tokens
    head_files, rank_trees   what Medusa and EAGLE-3 heads share: their files, the trees that they draft

A method has up to three parts: a drafter for draft workers, with its `DrafterSpec`; a source, which drafts inside a
verifier (`specq.verifier.DraftSource`); and what both compute with. The draft worker keeps each session's tree and
decides *which* nodes to expand; a drafter only says what follows a node.

To add one: a folder with a class derived from `Drafter`, a `DrafterSpec` of it, and one line in `METHODS`; another
package adds an entry point of the group `specq.drafters` instead. tests/drafting/ runs over the table. A source has its
name, its lane and what users read of it in `specq.protocol.origins`.
"""

from __future__ import annotations

from specq.drafting.former import as_drafter
from specq.drafting.interface import (
    CONTEXT,
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

PROPOSERS, Proposer, ProposerSpec = DRAFTERS, Drafter, DrafterSpec  # their names in the version before

__all__ = [
    "CONTEXT",
    "DRAFTERS",
    "METHODS",
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
