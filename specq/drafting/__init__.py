"""Proposers turn a context into draft nodes.

The draft worker keeps each session's tree and decides *which* nodes to expand; a proposer only says what follows a node.
To add one: a file with a class that fulfils `Proposer`, a `ProposerSpec` of it, and one line in `PROPOSERS`; another package
adds an entry point of the group `specq.proposers` instead. tests/drafting/ runs over the table.
"""

from __future__ import annotations

from specq.drafting.chains import ChainProposer, chain_by_passes, expand_chain, level_ids
from specq.drafting.draft_model.interface import NO_TOKEN, Chains, ChainSource
from specq.drafting.draft_model.proposer_chains import ProposerChains
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.eagle3.interface import (
    BEAM,
    WIDTH,
    DeviceNodes,
    Followed,
    Growing,
    Grown,
    Ranks,
    TreeHead,
    TreeRequest,
)
from specq.drafting.interface import (
    CONTEXT,
    ActivationReader,
    Children,
    Expansion,
    Proposer,
    ProposerSpec,
    draws_children,
)
from specq.drafting.medusa.interface import HeadSource, HiddenRow, Ranked
from specq.drafting.suffix import DEPTH as SUFFIX_DEPTH
from specq.drafting.suffix import NO_TEXT, TOO_OLD, NotReady, SuffixTexts, SuffixTree, TextDrafts
from specq.drafting.suffix import Requests as SuffixRequests
from specq.drafting.suffix import make_texts as make_suffix_texts
from specq.drafting.suffix import make_tree as make_suffix_tree
from specq.drafting.table import PROPOSERS
from specq.drafting.vocabulary import SAME, bridge

__all__ = [
    "BEAM",
    "CONTEXT",
    "NO_TEXT",
    "NO_TOKEN",
    "PROPOSERS",
    "SAME",
    "SUFFIX_DEPTH",
    "TOO_OLD",
    "WIDTH",
    "ActivationReader",
    "ChainProposer",
    "ChainSource",
    "Chains",
    "Children",
    "DeviceNodes",
    "Expansion",
    "Followed",
    "Growing",
    "Grown",
    "HeadSource",
    "HiddenRow",
    "NotReady",
    "Proposer",
    "ProposerChains",
    "ProposerSpec",
    "Ranked",
    "Ranks",
    "SuffixRequests",
    "SuffixTexts",
    "SuffixTree",
    "TextDrafts",
    "TreeHead",
    "TreeRequest",
    "bridge",
    "chain_by_passes",
    "draft_trees",
    "draws_children",
    "expand_chain",
    "level_ids",
    "make_suffix_texts",
    "make_suffix_tree",
]
