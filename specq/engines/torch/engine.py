"""The torch engine: Hugging Face checkpoints and GGUF files on a CPU, CUDA or MPS.

Its steps are those of `specq.engines.native.steps`. This module has what a device of torch adds. On a GPU a step may be
launched before the last is collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specq.engines.native import threads_of
from specq.engines.native.flights import Flight, Unread
from specq.engines.native.loaded import LoadedModel
from specq.engines.native.steps import PooledEngine
from specq.engines.profiling import step_times
from specq.engines.torch.forward import FedForward, feed_of
from specq.engines.torch.loading import load
from specq.verification import Judgements, Logits, StepBatch
from specq.verification.begun import Judging, begin
from specq.verification.devices import check_alive, warm_up

CPU = torch.device("cpu")


class TorchEngine(PooledEngine):
    """Fulfils `specq.engines.OverlappingEngine`.

    The arguments are those of `specq.engines.torch.loading.load`. The first may also be the result of that function or
    of `assemble`. More arguments:

    - threads: number of threads on a CPU, within the cores of the process. 0: the usual number, at most one per core.
    - helper_cores: one more thread on each of these cores.
    - verbose: log the decision on each draft node.

    max_sessions and max_step_rows have no effect here.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        eager: bool = False,
        batch_invariant: bool = False,
        threads: int = 0,
        helper_cores: tuple[int, ...] = (),
        verbose: bool = False,
        max_sessions: int = 0,
        max_step_rows: int = 0,
    ) -> None:
        team = threads_of(threads, helper_cores)
        loaded = model
        if isinstance(loaded, str):
            loaded = load(
                loaded, device=device, dtype=dtype, kv_slots=kv_slots, name=name, eager=eager,
                batch_invariant=batch_invariant, threads=team,
            )  # fmt: skip
        super().__init__(loaded, team, verbose=verbose)
        self._device: torch.device = loaded.forward.kv.device or CPU
        self.overlaps = self._device.type == "cuda" and isinstance(loaded.forward, FedForward)

    def _judge(self, batch: StepBatch, logits: Logits) -> tuple[Judging | Judgements, float]:
        """Judge the step, or start judging on a GPU."""
        return super()._judge(batch, logits) if self._device.type == "cpu" else (begin(batch, logits), 0.0)

    def _feed(self, batch: StepBatch, unread: Unread | None, after: Flight | None) -> dict[str, Any]:
        return feed_of(batch, unread, after)

    def _prepare_judging(self, logits: Logits) -> None:
        warm_up(logits)

    def _check_alive(self) -> None:
        check_alive(self._device)

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Measure step times; see `Engine.step_times`. On a GPU, measure each size that kernels are compiled for."""
        if self._device.type == "cpu":
            return super().step_times(sizes)
        compiled = [next((most for most in self.jumps if most >= size), size) for size in sizes]
        distinct = sorted(set(compiled))
        times = dict(zip(distinct, step_times(self, distinct, self._settle), strict=True))
        return [times[size] for size in compiled]

    def keep_times(self, times: Mapping[int, float]) -> None:
        """Keep times, if steps are not measured at each start; see `specq.engines.keep_times`."""
        if self._device.type == "cpu":
            super().keep_times(times)

    def _settle(self) -> None:
        """Wait until the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
