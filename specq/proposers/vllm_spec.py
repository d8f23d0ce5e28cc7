"""The `vllm` proposer as the table has it: `specq.proposers.vllm_model`, which imports torch, without that."""

from __future__ import annotations

from typing import Any

from specq.engines.vllm.spec import VllmModelOptions
from specq.proposers.interface import Proposer, ProposerSpec


def _make(model: str, **arguments: Any) -> Proposer:
    from specq.proposers.vllm_model import VllmModel

    return VllmModel(model, **arguments)


VLLM = ProposerSpec(_make, VllmModelOptions, package="vllm", takes_gguf=False)
