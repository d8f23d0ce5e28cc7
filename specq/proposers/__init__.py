"""Proposers turn a context into draft nodes.

The draft worker keeps each session's tree and decides *which* nodes to expand; a proposer only says what follows a node.
To add one: a file with a class that fulfils `Proposer`, a `ProposerSpec` of it, and one line in `PROPOSERS`; another package
adds an entry point of the group `specq.proposers` instead. tests/proposers/ runs over the table.
"""

from __future__ import annotations

from specq.proposers.chain_source import NO_TOKEN, Chains, ChainSource
from specq.proposers.chains import ChainProposer, chain_by_passes, expand_chain, level_ids
from specq.proposers.draft_model_spec import draft_trees
from specq.proposers.head_source import HeadSource, HiddenRow, Ranked
from specq.proposers.interface import (
    CONTEXT,
    ActivationReader,
    Children,
    Expansion,
    Proposer,
    ProposerSpec,
    draws_children,
)
from specq.proposers.proposer_chains import ProposerChains
from specq.proposers.suffix import DEPTH as SUFFIX_DEPTH
from specq.proposers.suffix import NO_TEXT, TOO_OLD, NotReady, SuffixTexts, SuffixTree, TextDrafts
from specq.proposers.suffix import Requests as SuffixRequests
from specq.proposers.suffix import make_texts as make_suffix_texts
from specq.proposers.suffix import make_tree as make_suffix_tree
from specq.proposers.tree_head import BEAM, WIDTH, DeviceNodes, Followed, Growing, Grown, Ranks, TreeHead, TreeRequest
from specq.proposers.vocabulary import SAME, bridge
from specq.runtime import Table

PROPOSERS = Table(
    "proposer",
    "specq.proposers",
    {
        "draft-model": "specq.proposers.draft_model_spec:DRAFT_MODEL",
        "eagle3": "specq.proposers.eagle_spec:EAGLE3",
        "ngram": "specq.proposers.ngram:NGRAM",
        "vllm": "specq.proposers.vllm_spec:VLLM",
    },
)

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
