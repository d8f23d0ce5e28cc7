"""The `vllm` proposer as the table has it: `specq.drafting.vllm.drafter`, which imports torch, without that."""

from __future__ import annotations

from typing import Any

from specq.drafting.interface import Proposer, ProposerSpec
from specq.engines.vllm.spec import VllmModelOptions


def _make(model: str, **arguments: Any) -> Proposer:
    from specq.drafting.vllm.drafter import VllmModel

    return VllmModel(model, **arguments)


VLLM = ProposerSpec(_make, VllmModelOptions, package="vllm", takes_gguf=False)
