"""The torch engine: Hugging Face checkpoints on a CPU, CUDA or MPS; many sessions, one packed forward pass a step.

The KV pool (torch/kv_pool.py) decides where KV lives, a forward (torch/native.py or torch/generic.py) runs the rows, and
`specq.verification` decides what is accepted. A step changes the pool only after forward pass and judgement have gone well, so
one that failed can be repeated with some of its sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specq.engines.checks import check_step, check_tokens
from specq.engines.profiling import step_times
from specq.engines.torch.kv_pool import KvPool
from specq.engines.torch.loading import LoadedModel, load
from specq.engines.torch.native import Threads
from specq.engines.torch.rows import PackedRows, pack_steps
from specq.protocol import ConfigError, Int32Array, Judgement, SessionStep
from specq.runtime import available_cores
from specq.verification.devices import check_alive, warm_up
from specq.verification.explain import log_decisions
from specq.verification.faults import judge_each


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a step's rows go: `slots` i32 for all of them, each session's chain and then its nodes."""

    steps: Sequence[SessionStep]
    slots: Int32Array
    rows: PackedRows


class TorchEngine:
    """Fulfils `specq.engines.Engine`. Arguments as in `specq.engines.torch.loading.load`, of which the first may be what
    that (or `assemble`) gave; and who computes on a CPU:

    threads       for steps of many rows, where the process runs; 0: as torch does, at most one a core
    helper_cores  one more thread for such steps on each of these
    verbose       log the decision on each drafted node

    max_sessions and max_step_rows are of no matter here.
    """

    max_chain = 0

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
        self._device = loaded.forward.kv.keys.device
        self._pool = KvPool(self.info.kv_slots)
        self._verbose, self._has_judged = verbose, False

    def open(self, session_id: int, token_ids: Int32Array) -> int:
        """Start a session; see `Engine.open`."""
        return self._pool.open(session_id, token_ids)

    def close(self, session_id: int) -> None:
        """End a session; see `Engine.close`."""
        self._pool.close(session_id)

    @property
    def free_slots(self) -> int:
        return self._pool.free_slots

    def step(self, steps: Sequence[SessionStep]) -> list[Judgement]:
        """Run and judge one packed forward pass; see `Engine.step`."""
        plan = self._plan(steps)
        try:
            check_tokens(plan.rows.token_ids, steps, self.info)
            output = self._forward(plan.rows)
            judgements = judge_each(steps, output.logits)
            if not self._has_judged and len(output.logits):
                self._has_judged = True
                warm_up(output.logits)
        except BaseException:
            self._pool.give(plan.slots)
            check_alive(self._device)
            raise
        self._commit(plan, judgements)
        if self._verbose and steps[0].session_id >= 0:  # not while it is profiled
            log_decisions(steps, output.logits, judgements)
        return judgements

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Measure; see `Engine.step_times`."""
        return step_times(self, sizes, self._settle)

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
        slots = self._pool.take(sum(len(step.token_ids) + len(step.tree.token_ids) for step in steps))
        try:
            return _Plan(steps, slots, pack_steps(steps, slots, self._stage(steps, slots)))
        except BaseException:
            self._pool.give(slots)
            raise

    def _stage(self, steps: Sequence[SessionStep], slots: Int32Array) -> list[Int32Array]:
        """Write each session's slots behind the end of its table; return the tables."""
        tables, taken = [], 0
        for step in steps:
            num_tokens = len(step.token_ids)
            tables.append(self._pool.stage(step.session_id, slots[taken : taken + num_tokens]))
            taken += num_tokens + len(step.tree.token_ids)
        return tables

    def _commit(self, plan: _Plan, judgements: list[Judgement]) -> None:
        """Append each session's chain and accepted path to its table; free the slots of the other nodes."""
        paths = {judgement.session_id: judgement.path for judgement in judgements}
        token_ids, slots = plan.rows.token_ids, plan.slots
        rejected: list[int] = []
        first = 0
        for step in plan.steps:
            first_node = first + len(step.token_ids)
            end = first_node + len(step.tree.token_ids)
            path = paths.get(step.session_id, ())
            if path:
                rows = [*range(first, first_node), *(first_node + node for node in path)]
                self._pool.append(step.session_id, token_ids[rows], slots[rows])
                rejected += set(range(first_node, end)).difference(rows)
            else:
                self._pool.append(step.session_id, token_ids[first:first_node], slots[first:first_node])
                rejected += range(first_node, end)
            first = end
        self._pool.give(slots[rejected])
