"""Engine steps: so many sessions, each with so many drafted nodes, after contexts of one length."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.forward import ForwardOutput
from specq.engines.torch.rows import PackedRows
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep, Tree

WARM_UP = 4


class TimedForward:
    """Stands in for an engine's forward: the device's time of each call."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.kv = forward, forward.kv
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, rows: PackedRows) -> ForwardOutput:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        inbox = self.forward._inboxes[-1]  # the one that this call uses
        copy = inbox.copy
        inbox.copy = lambda *args: (start.record(), copy(*args))  # from here on the device has work
        output: ForwardOutput = self.forward(rows)
        del inbox.copy
        end.record()
        self.spans.append((start, end))
        return output


class HostClock:
    """Times an engine's work on the host: planning a step, launching it, committing its outcome."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.times: dict[str, list[float]] = {}
        self.kept = {name: getattr(engine, name) for name in ("_plan", "_forward", "_commit")}
        for name, work in self.kept.items():
            setattr(engine, name, self._timed(name, work))

    def _timed(self, name: str, work: Any) -> Any:
        times = self.times.setdefault(name.strip("_"), [])

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = work(*args)
            times.append(time.perf_counter() - started)
            return result

        return timed

    def stop(self, skip: int) -> dict[str, float]:
        """Leave the engine as it was; return the median milliseconds of each."""
        for name, work in self.kept.items():
            setattr(self.engine, name, work)
        return {name: round(statistics.median(times[skip:]) * 1e3, 3) for name, times in self.times.items()}


def measure(
    engine: TorchEngine, num_sessions: int, num_nodes: int, *, context: int = 256, temperature: float = 0.0,
    shape: str = "chain", repeats: int = 25,
) -> dict[str, Any]:  # fmt: skip
    """Return median milliseconds of a step and of its forward on the device; drafts are random, so most are rejected."""
    rng = np.random.default_rng(0)
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(num_sessions)]
    texts = [rng.integers(10, 4000, context).astype(np.int32).tolist() for _ in params]
    starts = [engine.open(i, np.array(text, np.int32)) for i, text in enumerate(texts)]
    for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
        tokens = np.array(text[start:-1], np.int32)
        if len(tokens):
            engine.step([SessionStep(i, start, tokens, params[i], judged=False)])
    timed = engine._forward = TimedForward(engine._forward)
    host = HostClock(engine)
    lengths = [context - 1] * num_sessions
    last = [text[-1] for text in texts]
    times = []
    for _ in range(repeats + WARM_UP):
        steps = [
            SessionStep(i, lengths[i], np.array([last[i]], np.int32), params[i], _tree(rng, num_nodes, shape))
            for i in range(num_sessions)
        ]
        torch.cuda.synchronize()
        started = time.perf_counter()
        judgements = engine.step(steps)
        times.append(time.perf_counter() - started)
        for judgement in judgements:
            lengths[judgement.session_id] += 1 + len(judgement.path)
            last[judgement.session_id] = int(judgement.token_ids[-1])
    torch.cuda.synchronize()
    forwards = [start.elapsed_time(end) for start, end in timed.spans][WARM_UP:]
    host_ms = host.stop(WARM_UP)
    engine._forward = timed.forward
    for i in range(num_sessions):
        engine.close(i)
    step_ms, forward_ms = statistics.median(times[WARM_UP:]) * 1e3, statistics.median(forwards)
    return {
        "sessions": num_sessions, "nodes": num_nodes, "shape": shape, "context": context, "temperature": temperature,
        "rows": num_sessions * (1 + num_nodes), "step_ms": round(step_ms, 3), "forward_ms": round(forward_ms, 3),
        "overhead": round(step_ms / forward_ms - 1, 3), "host_ms": host_ms,
    }  # fmt: skip


def _tree(rng: np.random.Generator, num_nodes: int, shape: str) -> Tree:
    parents = np.arange(num_nodes, dtype=np.int32) - 1
    if shape == "tree":
        parents = np.array([-1 if i < 2 else (i - 2) // 2 for i in range(num_nodes)], np.int32)
    return replace(Tree(rng.integers(10, 4000, num_nodes).astype(np.int32), parents, np.zeros(num_nodes, np.float32)))
