"""Clocks of the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPEATS = 20


def event_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median milliseconds of the device between the ends of `work`, warmed up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median milliseconds of `work` replayed from a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return event_ms(graph.replay, repeats)


def bandwidth_tb_s() -> dict[str, float]:
    """Measure terabytes a second of a large copy (bytes read and written) and of a large sum (bytes read)."""
    source = torch.randn(1 << 30, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / event_ms(lambda: target.copy_(source)) / 1e9
    read = source.nbytes / event_ms(lambda: torch.sum(source, dtype=torch.float32)) / 1e9
    return {"copy": round(copied, 3), "sum": round(read, 3)}
