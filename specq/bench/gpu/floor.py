"""The device's bandwidth, and the least that a step can take: reading all weights with that bandwidth."""

from __future__ import annotations

import torch

from specq.bench.gpu.models import check_device
from specq.bench.gpu.parts import Found, Task
from specq.bench.gpu.timing import event_ms
from specq.bench.report import figure
from specq.protocol import ConfigError

NUM_VALUES = 1 << 30


def measure(task: Task) -> Found:
    """Time a large copy (bytes read and written) and a large sum (bytes read)."""
    if task.pair.device == "cpu":
        raise ConfigError("the floor is that of a GPU's memory; on a CPU there is none to measure")
    check_device(task.pair.device)
    copied, read = _rates(task.pair.device)
    floors = {
        f"{role} step at the least": figure("ms", [model.step_bytes / rate / 1e9 for rate in copied])
        for role, model in task.pair.models.items()
    }
    return Found({"copy": figure("TB/s", copied), "sum": figure("TB/s", read)} | floors)


def _rates(device: str) -> tuple[list[float], list[float]]:
    """Return terabytes a second of a copy and of a sum."""
    source = torch.randn(NUM_VALUES, device=device).to(torch.bfloat16)
    target = torch.empty_like(source)
    copied = [2 * source.nbytes / ms / 1e9 for ms in event_ms(lambda: target.copy_(source))]
    read = [source.nbytes / ms / 1e9 for ms in event_ms(lambda: torch.sum(source, dtype=torch.float32))]
    return copied, read
