"""The `vllm` drafter's entry for the table: `specq.drafting.vllm.drafter` without importing torch."""

from __future__ import annotations

from typing import Any

from specq.drafting.interface import Drafter
from specq.drafting.table import DrafterSpec
from specq.engines.vllm.spec import VllmModelOptions


def _make(model: str, **arguments: Any) -> Drafter:
    from specq.drafting.vllm.drafter import VllmModel

    return VllmModel(model, **arguments)


VLLM = DrafterSpec(_make, VllmModelOptions, package="vllm", takes_gguf=False)
