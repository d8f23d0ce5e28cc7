"""Engines own a model and its KV, and run one packed forward pass for many sessions.

To add one: a file with a class that fulfils `Engine`, and one line in `ENGINES`; tests/engines/ runs over the table.
"""

from __future__ import annotations

from specq.engines.checkpoint import describe, resolve_directory
from specq.engines.checks import check_works
from specq.engines.interface import Engine

ENGINES = {
    "torch": "specq.engines.torch.engine:TorchEngine",
    "vllm": "specq.engines.vllm.engine:VllmEngine",
}

__all__ = ["ENGINES", "Engine", "check_works", "describe", "resolve_directory"]
