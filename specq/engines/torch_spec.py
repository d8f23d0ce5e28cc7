"""The table entry of the `torch` engine, and its options, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specq.config import Cores, OwnOptions, option
from specq.engines.interface import Engine, EngineSpec


@dataclass(frozen=True, slots=True)
class TorchOptions(OwnOptions):
    """The keys of [target.torch]."""

    LABEL = "torch"

    helper_cores: Cores = option((), "CPU cores for one helper thread each, e.g. 0,2-3. Default: no helper threads.")


def _make(model: str, **arguments: Any) -> Engine:
    from specq.engines.torch.engine import TorchEngine

    return TorchEngine(model, **arguments)


TORCH = EngineSpec(_make, TorchOptions, package="torch")
