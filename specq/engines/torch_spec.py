"""The `torch` engine as the table has it, and its own options: `specq.engines.torch`, which imports torch, without
that."""

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
