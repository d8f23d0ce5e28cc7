"""Verify steps: so many sessions, each with so many drafted nodes, after contexts of one length."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from bench.engine_steps import WARM_UP, Texts
from bench.gpu.parts import Found, Task
from bench.gpu.timing import event
from bench.report import Figure, figure, tell
from specq.engines import Engine
from specq.protocol import SamplingParams

REPEATS = 25
HOST_WORK = ("_plan", "_forward", "_commit")  # of an engine's step, on the host: `_forward` only launches it


@dataclass(frozen=True)
class Case:
    """One kind of step."""

    sessions: int
    nodes: int
    context: int = 256
    shape: str = "chain"
    temperature: float = 0.0

    def __str__(self) -> str:
        return f"S={self.sessions} K={self.nodes} {self.shape} context={self.context} T={self.temperature}"


class StepClock:
    """Times an engine's work on the host, and on the device where the fused decoder runs, while it is entered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._host: dict[str, list[float]] = defaultdict(list)
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Self:
        self._kept = {name: getattr(self._engine, name) for name in HOST_WORK}
        timed = self._kept | {"_forward": self._on_device(self._kept["_forward"])}
        for name, work in timed.items():
            setattr(self._engine, name, self._on_host(name, work))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, work in self._kept.items():
            setattr(self._engine, name, work)

    def times(self) -> dict[str, list[float]]:
        """Return the milliseconds of each kind of work, a value a step."""
        host = {f"host {name.strip('_')}": times for name, times in self._host.items()}
        if not self._spans:
            return host
        torch.cuda.synchronize()
        return {"forward": [start.elapsed_time(end) for start, end in self._spans]} | host

    def _on_host(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = work(*args)
            self._host[name].append(1e3 * (time.perf_counter() - started))
            return result

        return timed

    def _on_device(self, forward: Any) -> Callable[..., Any]:
        """Return a forward whose calls are timed from the copy of a step's integers on: until then the device has no work."""
        if not (hasattr(forward, "_inboxes") and forward.device.type == "cuda"):
            return forward  # type: ignore[no-any-return]

        def timed(*args: Any) -> Any:
            start, end = event(), event()
            inbox = forward._inboxes[-1]  # the one that this call uses
            copy = inbox.copy
            inbox.copy = lambda *given: (start.record(), copy(*given))
            try:
                output = forward(*args)
            finally:
                del inbox.copy
            end.record()
            self._spans.append((start, end))
            return output

        return timed


def measure(task: Task) -> Found:
    """Time steps over sessions and nodes; drafts are random, so most are rejected."""
    figures: dict[str, Figure] = {}
    for case in _cases(task.sessions):
        own = {f"{case}, {kind}": figure("ms", times) for kind, times in step_times(task.pair.engine, case).items()}
        tell(f"{case}: {own[f'{case}, step']['median']:.3f} ms")
        figures |= own
    return Found(figures)


def _cases(sessions: tuple[int, ...]) -> Iterator[Case]:
    for count in sessions:
        yield from (Case(count, nodes) for nodes in (0, 4, 8))
    yield from (Case(1, 8, context=context) for context in (1000, 1900))
    yield Case(1, 14, shape="tree")
    yield Case(min(32, max(sessions)), 8, temperature=0.8)


def step_times(engine: Engine, case: Case, repeats: int = REPEATS) -> dict[str, list[float]]:
    """Return the milliseconds of a kind of step, as a whole and in parts."""
    params = SamplingParams(temperature=case.temperature, seed=1, ignore_eos=True)
    texts = Texts(engine, case.sessions, case.context, params, case.shape)
    with StepClock(engine) as clock:
        steps = [1e3 * texts.step(case.nodes) for _ in range(WARM_UP + repeats)]
    texts.close()
    return {name: times[WARM_UP:] for name, times in ({"step": steps} | clock.times()).items()}
