"""The engines that come with specq, as their table has them; see `EngineSpec`."""

from __future__ import annotations

from typing import Any

from specq.engines.interface import Engine, EngineSpec


def _torch(model: str, **arguments: Any) -> Engine:
    from specq.engines.torch.engine import TorchEngine

    return TorchEngine(model, **arguments)


def _vllm(model: str, **arguments: Any) -> Engine:
    from specq.engines.vllm.engine import VllmEngine

    return VllmEngine(model, **arguments)


TORCH = EngineSpec(_torch)
VLLM = EngineSpec(_vllm, renumbers_devices=True)
