"""The proposers that come with specq, as their table has them; see `ProposerSpec`."""

from __future__ import annotations

from typing import Any

from specq.proposers.interface import Proposer, ProposerSpec


def _draft_model(model: str, **arguments: Any) -> Proposer:
    from specq.proposers.draft_model import DraftModel

    return DraftModel(model, **arguments)


def _ngram(model: str = "", **arguments: Any) -> Proposer:
    from specq.proposers.ngram import NgramProposer

    return NgramProposer(model, **arguments)


def _vllm(model: str, **arguments: Any) -> Proposer:
    from specq.proposers.vllm_model import VllmModel

    return VllmModel(model, **arguments)


DRAFT_MODEL = ProposerSpec(_draft_model)
NGRAM = ProposerSpec(_ngram, needs_model=False)
VLLM = ProposerSpec(_vllm)
