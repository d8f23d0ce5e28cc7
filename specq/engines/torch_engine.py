"""The torch engine: Hugging Face checkpoints on a CPU, CUDA or MPS; many sessions, one packed forward pass a step.

The KV pool (torch/kv_pool.py) decides where KV lives, a forward (torch/native.py or torch/generic.py) runs the rows, and
`specq.verification.judge` decides what is accepted. A step changes the pool only after the forward pass has gone well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specq.cpu import available_cores
from specq.engines.torch.kv_pool import KvPool
from specq.engines.torch.loading import LoadedModel, load
from specq.engines.torch.native import Threads
from specq.engines.torch.rows import PackedRows, pack_steps
from specq.errors import EngineError
from specq.params import SamplingParams
from specq.types import Int32Array, Judgement, SessionStep, Tree
from specq.verification.devices import warm_up
from specq.verification.explain import log_decisions
from specq.verification.judge import judge

PROFILE_SESSIONS = 8
PROFILE_CONTEXT = 8  # tokens; less than a block, so that profiling leaves nothing in the prefix cache
PROFILE_REPEATS = 7


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
        threads: int = 0,
        helper_cores: tuple[int, ...] = (),
        verbose: bool = False,
    ) -> None:
        own = threads or min(torch.get_num_threads(), len(available_cores()))
        team = Threads(own, helper_cores)
        loaded = model
        if isinstance(loaded, str):
            loaded = load(loaded, device=device, dtype=dtype, kv_slots=kv_slots, name=name, eager=eager, threads=team)
        self.info = loaded.info
        self._forward = loaded.forward
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
            output = self._forward(plan.rows)
            judgements = judge(steps, output.logits)
        except BaseException:
            self._pool.give(plan.slots)
            raise
        self._commit(plan, judgements)
        if self._verbose and steps[0].session_id >= 0:  # not while it is profiled
            log_decisions(steps, output.logits, judgements)
        if not self._has_judged and len(output.logits):
            self._has_judged = True
            warm_up(output.logits)
        return judgements

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Measure the least seconds of a step with so many rows, of a few rounds over all sizes: what disturbs a
        measurement only ever adds to it. See `Engine.step_times`."""
        rounds = [[self._time_step(size) for size in sizes] for _ in range(PROFILE_REPEATS)]
        return [min(times) for times in zip(*rounds, strict=True)]

    def _plan(self, steps: Sequence[SessionStep]) -> _Plan:
        """Check the steps, take their slots and lay out their rows; EngineError leaves everything as it was."""
        for step in steps:
            self._check(step)
        self._check_tokens(steps)
        slots = self._pool.take(sum(len(step.token_ids) + len(step.tree.token_ids) for step in steps))
        tables, taken = [], 0
        for step in steps:
            num_tokens = len(step.token_ids)
            tables.append(self._pool.stage(step.session_id, slots[taken : taken + num_tokens]))
            taken += num_tokens + len(step.tree.token_ids)
        return _Plan(steps, slots, pack_steps(steps, slots, tables))

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

    def _check(self, step: SessionStep) -> None:
        """Raise EngineError for a step that does not fit its session or the model."""
        length, num_tokens, num_nodes = (
            self._pool.length(step.session_id),
            len(step.token_ids),
            len(step.tree.token_ids),
        )
        if step.start != length:
            raise _misfit(step, f"the step starts at {step.start}; its KV holds {length} tokens")
        if not num_tokens or (num_nodes and not step.judged):
            raise _misfit(step, "a step needs a token, and nodes only where it is judged")
        if length + num_tokens + num_nodes > self.info.max_length:  # as deep as so many nodes can be
            longest = step.base_len + int(step.tree.depths().max(initial=0))
            if longest > self.info.max_length:
                raise _misfit(step, f"{longest} tokens; {self.info.name} takes {self.info.max_length}")

    def _check_tokens(self, steps: Sequence[SessionStep]) -> None:
        """Raise EngineError if a token is none of the model's."""
        token_ids = np.concatenate([part for step in steps for part in (step.token_ids, step.tree.token_ids)])
        if token_ids.min() >= 0 and token_ids.max() < self.info.vocab_size:
            return
        for step in steps:
            own = np.concatenate([step.token_ids, step.tree.token_ids])
            if own.min() < 0 or own.max() >= self.info.vocab_size:
                raise _misfit(step, f"token ids outside [0, {self.info.vocab_size})")

    def _time_step(self, num_rows: int) -> float:
        """Return the seconds of a step with so many rows, divided among a few short sessions."""
        num_sessions = min(num_rows, PROFILE_SESSIONS)
        share = [len(part) for part in np.array_split(np.arange(num_rows), num_sessions)]
        return self._time_once(share)

    def _time_once(self, share: list[int]) -> float:
        """Time one step in which session i has share[i] rows."""
        context = np.arange(PROFILE_CONTEXT, dtype=np.int32) % self.info.vocab_size
        session_ids = [-1 - i for i in range(len(share))]  # real sessions have ids >= 0
        for session_id in session_ids:
            self.open(session_id, context)
        try:
            self.step([SessionStep(i, 0, context[:-1], SamplingParams(), judged=False) for i in session_ids])
            steps = [_profile_step(i, context, rows) for i, rows in zip(session_ids, share, strict=True)]
            started = time.perf_counter()
            self.step(steps)
            return time.perf_counter() - started
        finally:
            for session_id in session_ids:
                self.close(session_id)


def _misfit(step: SessionStep, reason: str) -> EngineError:
    return EngineError(f"session {step.session_id}: {reason}")


def _profile_step(session_id: int, context: Int32Array, num_rows: int) -> SessionStep:
    """A decoding step with num_rows - 1 nodes, all children of the context."""
    num_nodes = num_rows - 1
    tree = Tree(np.zeros(num_nodes, np.int32), np.full(num_nodes, -1, np.int32), np.zeros(num_nodes, np.float32))
    return SessionStep(session_id, len(context) - 1, context[-1:], SamplingParams(), tree)
