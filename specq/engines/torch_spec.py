"""The table entry of the `torch` engine, and its options, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specq.engines.interface import Engine, EngineSpec
from specq.engines.native_spec import HostOptions


@dataclass(frozen=True, slots=True)
class TorchOptions(HostOptions):
    """The keys of [target.torch]."""

    LABEL = "torch"


def _make(model: str, **arguments: Any) -> Engine:
    from specq.engines.torch.engine import TorchEngine

    return TorchEngine(model, **arguments)


TORCH = EngineSpec(_make, TorchOptions, package="torch", colocates=True)
