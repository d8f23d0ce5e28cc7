"""Clocks of the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specq.protocol import ConfigError

REPEATS = 20
WARM_UP = 3


def check_device() -> None:
    """Raise ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("this needs a CUDA device, and there is none")


def event() -> torch.cuda.Event:
    """Return an event whose time can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def event_ms(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Return the milliseconds of the device between the ends of `work`, warmed up."""
    for _ in range(WARM_UP):
        work()
    times = []
    for _ in range(repeats):
        start, end = event(), event()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def graph_ms(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Return the milliseconds of `work` replayed from a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return event_ms(graph.replay, repeats)
