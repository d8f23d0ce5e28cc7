"""The `draft-model` proposer as the table has it: `specq.proposers.draft_model`, which imports torch, without that."""

from __future__ import annotations

from typing import Any

from specq.proposers.interface import Proposer, ProposerSpec


def _make(model: str, **arguments: Any) -> Proposer:
    from specq.proposers.draft_model import DraftModel

    return DraftModel(model, **arguments)


DRAFT_MODEL = ProposerSpec(_make)
