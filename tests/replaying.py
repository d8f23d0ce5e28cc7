"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import torch

from specq.engines.torch import Replays


class StandIn(Replays):
    """Replays work as a CUDA graph does: with the first inputs, for any later ones. It counts what it does, and
    fails where a later work reads other memory than the first one, which a graph would go on to read."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), uses_graphs=True)
        self.num_replayed = 0
        self._memory_of: dict[Hashable, list[int]] = {}

    def _run(self, key: Hashable, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        read = [cell.cell_contents for cell in getattr(work, "__closure__", None) or ()]
        places = [one.data_ptr() for one in read if isinstance(one, torch.Tensor)]
        assert self._memory_of.setdefault(key, places) == places, f"the work of {key} reads memory that does not stay"
        return super()._run(key, work)

    def forget(self) -> None:
        self._memory_of.clear()
        super().forget()

    def _record(self, work: Callable[[], None]) -> Any:
        def replay() -> None:
            self.num_replayed += 1
            work()

        return SimpleNamespace(replay=replay)
