"""Work of fixed shapes on a device, run again and again: on a GPU one CUDA graph for each kind of it.

The work reads its inputs from memory that stays where it is, and writes its results there. What it allocates meanwhile is shared by all graphs of
the same `Replays`, so nothing of it is left when another one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch


class Recorded(Protocol):
    """Work that was recorded."""

    def replay(self) -> None: ...


class Replays:
    """Work by key, on one device. `uses_graphs`: whether it is recorded; else it is run as it is each time."""

    def __init__(self, device: torch.device, *, uses_graphs: bool) -> None:
        self.device, self.uses_graphs = device, uses_graphs
        self._recorded: dict[Hashable, Recorded] = {}
        self._memory: Any = None  # what torch calls a pool

    @classmethod
    def on(cls, device: torch.device) -> Replays | None:
        """Return it for a device that records; None where work has any shape."""
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        return cls(device, uses_graphs=True) if is_nvidia else None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run the work of this key; what the first one of a key was given counts for all later ones."""
        if not self.uses_graphs:
            work()
            return
        recorded = self._recorded.get(key)
        if recorded is None:
            work()  # compiles what is not compiled yet, which a recording must not
            self._recorded[key] = self._record(work)
            return
        recorded.replay()

    def _record(self, work: Callable[[], None]) -> Recorded:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            work()
        return graph

    def forget(self) -> None:
        """Forget all that was recorded: the memory that it reads or writes has moved."""
        if self._recorded and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # one of them may be running
        self._recorded.clear()
