"""The torch engine: Hugging Face checkpoints on a CPU, CUDA or MPS; many sessions, one packed forward pass a step.

The KV pool (torch/kv_pool.py) decides where KV lives, a forward (torch/native.py or torch/generic.py) runs the rows, and
`specq.verification` decides what is accepted. A step changes the pool only after forward pass and judgement have gone well, so
one that failed can be repeated with some of its sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specq.engines.checks import check_asked, check_step, check_tokens
from specq.engines.profiling import quick_step_times, step_times
from specq.engines.step_cache import keep, recall, step_times_file
from specq.engines.torch.compiler import built_kernels
from specq.engines.torch.forward import ForwardOutput, RowTap, tapped_rows
from specq.engines.torch.kv_pool import KvPool
from specq.engines.torch.loading import LoadedModel, load
from specq.engines.torch.native import Threads
from specq.engines.torch.rows import PackedRows, pack_steps
from specq.protocol import (
    FINAL,
    NO_SCRATCH,
    NO_TAP,
    ConfigError,
    Int32Array,
    Judgement,
    SessionRows,
    SessionStep,
    StepOutput,
    Tap,
)
from specq.runtime import available_cores, processor
from specq.verification.devices import check_alive, warm_up
from specq.verification.explain import log_decisions
from specq.verification.faults import judge_each


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a step's rows go: `slots` i32 for all of them, each session's chain, its nodes and its scratch rows; `sizes`: their numbers."""

    steps: Sequence[SessionStep]
    sizes: Sequence[int]
    slots: Int32Array
    rows: PackedRows


class TorchEngine:
    """Fulfils `specq.engines.Engine`. Arguments as in `specq.engines.torch.loading.load`, of which the first may be what
    that (or `assemble`) gave; and who computes on a CPU:

    threads       where the process runs; 0: as torch does, at most one a core
    helper_cores  one more thread on each of these
    verbose       log the decision on each drafted node

    max_sessions and max_step_rows are of no matter here.
    """

    max_chain = 0
    takes_scratch = True

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        eager: bool = False,
        threads: int = 0,
        helper_cores: tuple[int, ...] = (),
        verbose: bool = False,
        max_sessions: int = 0,
        max_step_rows: int = 0,
    ) -> None:
        own = threads or min(torch.get_num_threads(), len(available_cores()))
        team = Threads(own, helper_cores)
        loaded = model
        if isinstance(loaded, str):
            loaded = load(loaded, device=device, dtype=dtype, kv_slots=kv_slots, name=name, eager=eager, threads=team)
        if loaded.token_ids is not None:
            raise ConfigError(
                f"{loaded.info.name} is a draft model, which knows only some tokens; it cannot be a target"
            )
        self.info = loaded.info
        self._forward = loaded.forward
        self.num_tap_layers = loaded.forward.num_tap_layers
        self._device = loaded.forward.kv.keys.device
        self._pool = KvPool(self.info.kv_slots)
        self._threads, self._is_helped = team, loaded.forward.is_helped
        self._verbose, self._has_judged = verbose, False

    @property
    def is_helped(self) -> bool:
        """Whether threads on `helper_cores` take part in steps; see `Engine.is_helped`."""
        return self._is_helped

    @is_helped.setter
    def is_helped(self, is_helped: bool) -> None:
        self._is_helped = self._forward.is_helped = is_helped

    def open(self, session_id: int, token_ids: Int32Array) -> int:
        """Start a session; see `Engine.open`."""
        return self._pool.open(session_id, token_ids)

    def close(self, session_id: int) -> None:
        """End a session; see `Engine.close`."""
        self._pool.close(session_id)

    @property
    def free_slots(self) -> int:
        return self._pool.free_slots

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Run and judge one packed forward pass; see `Engine.step`."""
        check_asked(self, steps, tap)
        plan = self._plan(steps)
        try:
            check_tokens(plan.rows.token_ids, steps, self.info)
            output, hidden = self._run(plan, tap)
            logits, scratch_logits = _set_apart(output.logits, steps)
            judgements = judge_each(steps, logits)
            if not self._has_judged and len(logits):
                self._has_judged = True
                warm_up(logits)
        except BaseException:
            self._pool.give(plan.slots)
            check_alive(self._device)
            raise
        self._commit(plan, judgements)
        if self._verbose and steps[0].session_id >= 0:  # not while it is profiled
            log_decisions(steps, logits, judgements)
        return StepOutput(judgements, hidden, scratch_logits)

    def _run(self, plan: _Plan, tap: Tap) -> tuple[ForwardOutput, SessionRows | None]:
        """Run the forward pass; return its output, and the hidden states that were asked for."""
        if not tap.layers:
            return self._forward(plan.rows), None
        rows, starts = tapped_rows(plan.steps, tap)
        if tap.layers == (FINAL,) and not tap.chunks:  # what the head reads anyway
            output = self._forward(plan.rows)
            return output, SessionRows(output.hidden[: len(rows)], starts)
        output = self._forward(plan.rows, RowTap(tap.layers, rows))
        return output, SessionRows(output.tapped, starts)

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Measure; see `Engine.step_times`. On a GPU each size is measured, since kernels are compiled for it."""
        if self._device.type != "cpu":
            return step_times(self, sizes, self._settle)
        file = self._times_file()
        found = quick_step_times(self, sizes, recalled := recall(file))
        if found != recalled:
            keep(file, found)
        return [found[size] for size in sizes if size in found]

    def _times_file(self) -> Path:
        """Return where the times of steps by the threads that take part now are kept."""
        threads = self._threads if self.is_helped else self._threads.own_only
        about = self.info.fingerprint, self.info.dtype, threads, type(self._forward).__name__
        return step_times_file(processor(), *about, built_kernels())

    def _settle(self) -> None:
        """Wait until the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def shutdown(self) -> None:
        """Nothing to do: it all ends with the process."""

    def _plan(self, steps: Sequence[SessionStep]) -> _Plan:
        """Check the steps, take their slots and lay out their rows; an error leaves everything as it was."""
        for step in steps:
            check_step(step, self._pool.length(step.session_id), self.info)
        sizes = [step.num_rows for step in steps]
        slots = self._pool.take(sum(sizes))
        try:
            return _Plan(steps, sizes, slots, pack_steps(steps, slots, self._stage(steps, sizes, slots)))
        except BaseException:
            self._pool.give(slots)
            raise

    def _stage(self, steps: Sequence[SessionStep], sizes: Sequence[int], slots: Int32Array) -> list[Int32Array]:
        """Write each session's slots behind the end of its table; return the tables."""
        tables, taken = [], 0
        for step, size in zip(steps, sizes, strict=True):
            num_tokens = len(step.token_ids)
            tables.append(self._pool.stage(step.session_id, slots[taken : taken + num_tokens]))
            taken += size
        return tables

    def _commit(self, plan: _Plan, judgements: list[Judgement]) -> None:
        """Append each session's chain and accepted path to its table; free the slots of the other rows."""
        paths = {judgement.session_id: judgement.path for judgement in judgements}
        token_ids, slots = plan.rows.token_ids, plan.slots
        rejected: list[int] = []
        first = 0
        for step, size in zip(plan.steps, plan.sizes, strict=True):
            first_node, end = first + len(step.token_ids), first + size
            path = paths.get(step.session_id, ())
            if path:
                rows = [*range(first, first_node), *(first_node + node for node in path)]
                self._pool.append(step.session_id, token_ids[rows], slots[rows])
                rejected += set(range(first_node, end)).difference(rows)
            else:
                self._pool.extend(step.session_id, token_ids[first:first_node])
                rejected += range(first_node, end)
            first = end
        self._pool.give(slots[rejected])


def _set_apart(logits: torch.Tensor, steps: Sequence[SessionStep]) -> tuple[torch.Tensor, SessionRows | None]:
    """Return the logits of the judged rows, and those of the scratch rows, which come last."""
    if all(step.scratch is NO_SCRATCH for step in steps):
        return logits, None
    num_judged = sum(step.num_judged_rows for step in steps)
    starts = np.cumsum([0, *(step.scratch.num_rows for step in steps)], dtype=np.int32)
    return logits[:num_judged], SessionRows(logits[num_judged:], starts)
