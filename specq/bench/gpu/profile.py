"""Where a pass's time goes, kernel by kernel; without PDL, under which kernels wait inside each other's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from specq.bench.gpu.parts import Found, Task
from specq.bench.gpu.passes import pass_batch, without_pdl
from specq.bench.report import tell
from specq.engines.torch.fused_layers import FusedDecoder

MOST = 16  # kernels that are reported, and FEW that are shown
FEW = 11
SIZES = {"target": (1, 16, 64, 320), "draft": (1, 16)}


def measure(task: Task) -> Found:
    """Return the kernels of whole passes of both decoders."""
    found: dict[str, list[dict[str, Any]]] = {}
    for role, model in task.pair.models.items():
        for size in SIZES[role]:
            found[f"{role} {size} rows"] = pass_kernels(model.decoder, size)
    for name, entries in found.items():
        tell(
            "\n".join(
                [name, *(f"{one['us_each']:10.2f} us x {one['count']:6}  {one['kernel']}" for one in entries[:FEW])]
            )
        )
    return Found(results=found)


def pass_kernels(decoder: FusedDecoder, size: int) -> list[dict[str, Any]]:
    """Return the kernels of a pass of so many padded rows; see `kernels`."""
    batch, scratch = pass_batch(decoder, size)
    with without_pdl(decoder):
        return kernels(lambda: decoder.run(batch, scratch))


def kernels(work: Callable[[], object], repeats: int = 3) -> list[dict[str, Any]]:
    """Return the kernels of `work` by total time: count and microseconds each, and of all a step."""
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
