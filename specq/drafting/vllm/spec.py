"""The `vllm` drafter as the table has it: `specq.drafting.vllm.drafter`, which imports torch, without that."""

from __future__ import annotations

from typing import Any

from specq.drafting.interface import Drafter
from specq.drafting.table import DrafterSpec
from specq.engines.vllm.spec import VllmModelOptions


def _make(model: str, **arguments: Any) -> Drafter:
    from specq.drafting.vllm.drafter import VllmModel

    return VllmModel(model, **arguments)


VLLM = DrafterSpec(_make, VllmModelOptions, package="vllm", takes_gguf=False)
