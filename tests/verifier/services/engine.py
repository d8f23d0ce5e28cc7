"""The target's engine: steps that take time by a virtual clock, longer beside drafters, and stall now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from specq.engines import Launched
from specq.protocol import NO_TAP, Int32Array, SessionStep, StepOutput, Tap
from specq.verification import Judgements, StepBatch
from specq.verifier import StepCurve
from tests.verifier.services.service import STALL_STEPS, Service
from tests.verifier.services.texts import Texts
from tests.verifier.timed_target import INFO, Machine

CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
OF_REPEATS = 10_000  # between the seeds of two repeats: more than there are services
CORRECTION = -1  # as in `Judgements`


@dataclass(eq=False)
class FlyingStep:
    """A step in flight; fulfils `specq.engines.Launched`."""

    engine: ServiceEngine
    batch: StepBatch
    done_at: float

    @property
    def feeds(self) -> bool:
        """See `Launched`."""
        return not len(self.batch.parents)

    def collect(self) -> StepOutput:
        """See `Launched`."""
        return self.engine.collect(self)

    def discard(self) -> None:
        """See `Launched`."""
        raise AssertionError("no step fails here")


class ServiceEngine:
    """Fulfils `OverlappingEngine`. `slowdown` says at a launch by what factor drafters slow the step; repeats differ in
    the jitter of steps."""

    max_chain = num_tap_layers = 0
    takes_unread = is_helped = False
    jumps: tuple[int, ...] = ()
    takes_scratch = True
    info = INFO
    free_slots = 10_000_000

    def __init__(
        self, service: Service, machine: Machine, texts: Texts, slowdown: Callable[[], float], repeat: int
    ) -> None:
        self._own, self._machine, self._texts, self._slowdown = service.machine, machine, texts, slowdown
        self.overlaps = self._own.overlaps
        self._random = Random(service.seed + OF_REPEATS * repeat)
        self._stall_s = STALL_STEPS * self._own.plain_s(service.phases[0].num_sessions)
        self._stalls = service.stall_times

    def curve(self) -> StepCurve:
        """Return the step times that the verifier gets at the start."""
        return StepCurve([*CURVE_ROWS], self.step_times(CURVE_ROWS))

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """See `Engine`."""
        return 0

    def close(self, session_id: int) -> None:
        """See `Engine`."""

    def shutdown(self) -> None:
        """See `Engine`."""

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """See `Engine`."""
        return [self._own.profile * self._own.step_s(size) for size in sizes]

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """See `Engine`."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> FlyingStep:
        """See `OverlappingEngine`."""
        batch = StepBatch.of(steps)
        self._host(len(batch), 0.4)
        seconds = self._own.step_s(int(batch.num_rows.sum())) * self._slowdown()
        if int(np.count_nonzero(batch.is_judged)) < len(batch) or bool((batch.num_tokens > 1).any()):
            seconds += self._own.mixed_ms / 1000
        seconds *= np.exp(self._random.gauss(0.0, self._own.jitter))
        if self._stalls and self._machine.now >= self._stalls[0]:
            seconds += self._stall_s
            del self._stalls[0]
        return FlyingStep(self, batch, self._machine.launch(float(seconds)))

    def collect(self, flying: FlyingStep) -> StepOutput:
        """Wait for a step and judge it."""
        self._machine.wait(flying.done_at)
        self._host(len(flying.batch), 0.3)
        return StepOutput(self._judged(flying.batch.judged()))

    def _host(self, num_sessions: int, part: float) -> None:
        self._machine.work(part * (self._own.host_ms + self._own.session_ms * num_sessions) / 1000)

    def _judged(self, batch: StepBatch) -> Judgements:
        """Return each session's longest path that the target says, and its correction."""
        node_tokens, parents, first = batch.node_tokens.tolist(), batch.parents.tolist(), 0
        counts, tokens, nodes = list[int](), list[int](), list[int]()
        sizes = zip(batch.session_ids, batch.base_lens.tolist(), batch.num_nodes.tolist(), strict=True)
        for session_id, length, num_nodes in sizes:
            truth, at, num_right = self._texts.after(session_id, length), -1, 0
            for i in range(num_nodes):
                if parents[first + i] == at and node_tokens[first + i] == truth[num_right]:
                    at, num_right = i, num_right + 1
                    nodes.append(i)
            nodes.append(CORRECTION)
            tokens += truth[: num_right + 1]
            counts.append(num_right + 1)
            first += num_nodes
        arrays = np.array(counts, np.intp), np.array(tokens, np.int32), np.array(nodes, np.int32)
        return Judgements(batch.session_ids, *arrays)
