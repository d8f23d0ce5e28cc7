"""What all tests of engines need on a GPU."""

from __future__ import annotations

import gc
import sys

import pytest


@pytest.fixture(autouse=True)
def memory_of_earlier_engines() -> None:
    """vLLM measures at its start how much memory is free, and refuses to go on where some becomes free meanwhile."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
