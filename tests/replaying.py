"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from specq.engines.torch import Replays


class StandIn(Replays):
    """Replays work as a CUDA graph does: as it was first given, whatever is given later. It counts what it does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), uses_graphs=True)
        self.num_replayed = 0

    def _record(self, work: Callable[[], None]) -> Any:
        def replay() -> None:
            self.num_replayed += 1
            work()

        return SimpleNamespace(replay=replay)
