"""The device of a measurement: whether it is available, and the time of its kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from specq.engines.torch import pick_device
from specq.protocol import ConfigError

MOST = 16  # maximum kernels in a report


def check_device(device: str = "cuda") -> None:
    """Raise ConfigError if the device is a GPU that this machine, or its torch, does not have."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device} is not available; this suite needs a CUDA device (--device cpu: a trial)")
    pick_device(device)


def kernels(work: Callable[[], object], repeats: int = 3) -> list[dict[str, Any]]:
    """Return the kernels of `work` by total time: count, microseconds each, and microseconds a step."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            totals[event.name].append(event.device_time)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))[:MOST]
    return [
        {
            "kernel": name[:60],
            "count": round(len(times) / repeats, 1),
            "us_each": round(sum(times) / len(times), 2),
            "us_a_step": round(sum(times) / repeats, 1),
        }
        for name, times in ranked
    ]
