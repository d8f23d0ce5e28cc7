"""What it brings that the next step is launched before the last one is collected: a verifier in this process, with plain sessions.

Both ways are measured in turns, with everything that a verifier's process does but its sockets. `device` is the time from the copy of a step's
integers to the choice of its tokens, `busy` its share of all time: with overlap, what is left is the device waiting for the host.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from bench.gpu.parts import Found, Task
from bench.gpu.timing import event
from bench.report import Figure, figure, tell
from specq.protocol import Close, Open, SamplingParams, Speculation, encode
from specq.transport import calm_collector
from specq.verifier import StepCurve, Verifier

CONTEXT, WARM_UP, STEPS, ROUNDS = 64, 10, 60, 3  # 256 sessions fit the KV of `models`
WAYS = {"overlapped": True, "not overlapped": False}


class DeviceClock:
    """Times each step on the device while it is entered; on a CPU there is nothing to time."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._spans = engine, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def __enter__(self) -> Self:
        self._judge, forward = self._engine._judge, self._engine._forward
        self._inboxes = list(getattr(forward, "_inboxes", ())) if torch.cuda.is_available() else []
        for inbox in self._inboxes:
            inbox.copy = self._begins(inbox.copy)
        if self._inboxes:
            self._engine._judge = self._ends
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for inbox in self._inboxes:
            del inbox.copy
        self._engine._judge = self._judge

    def _begins(self, copy: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            self._start = event()
            self._start.record()
            copy(*given)

        return timed

    def _ends(self, *given: Any) -> Any:
        judging, end = self._judge(*given), event()
        end.record()
        self._spans.append((self._start, end))
        return judging

    def spans(self) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Return when each step began and ended; the device has come to all of it."""
        if self._spans:
            torch.cuda.synchronize()
        return self._spans


class Served(NamedTuple):
    """What steps of a verifier gave: how long they took, the tokens, and when each began and ended on the device, where there is one."""

    seconds: float
    num_tokens: int
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]


def serve(
    verifier: Verifier,
    openings: Sequence[Open],
    warm_up: int,
    num_steps: int,
    *,
    warmed: Callable[[], object] = lambda: None,
) -> Served:
    """Open sessions, let them decode, call `warmed` after so many steps, time so many more, and close them."""
    for message in openings:
        verifier.handle(message, time.monotonic())
    while any(session.num_pending > 1 for session in verifier.sessions.values()):
        _turn(verifier)
    for _ in range(warm_up):
        _turn(verifier)
    calm_collector()
    warmed()
    before = _num_tokens(verifier)
    with DeviceClock(verifier.engine) as clock:
        started = time.perf_counter()
        for _ in range(num_steps):
            _turn(verifier)
        seconds = time.perf_counter() - started
        spans = clock.spans()
    num_tokens = _num_tokens(verifier) - before
    for message in openings:
        verifier.handle(Close(session_id=message.session_id, epoch=message.epoch), time.monotonic())
    while verifier.has_work:
        _turn(verifier)
    return Served(seconds, num_tokens, spans)


def measure(task: Task) -> Found:
    """Measure plain sessions, greedy and sampled; a figure has a value a round."""
    figures: dict[str, Figure] = {}
    for count in task.sessions:
        for temperature in (0.0, 0.8):
            found = _of_sessions(task, count, temperature)
            figures |= found
            tell(", ".join(f"{name}: {one['median']}" for name, one in found.items() if "tokens/s" in name))
    return Found(figures)


def _of_sessions(task: Task, count: int, temperature: float) -> dict[str, Figure]:
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for way, overlaps in WAYS.items():
            for (name, unit), value in _serve(task.pair.engine, count, temperature, overlaps=overlaps).items():
                values[f"S={count} T={temperature} {way}, {name}", unit].append(value)
    return {name: figure(unit, each) for (name, unit), each in values.items()}


def _serve(engine: Any, count: int, temperature: float, *, overlaps: bool) -> dict[tuple[str, str], float]:
    """Return what so many sessions gave, by name and unit."""
    kept, engine.overlaps = engine.overlaps, overlaps and engine.overlaps
    verifier = Verifier(
        engine, StepCurve([1, 512], [0.004, 0.008]), incarnation=1, max_sessions=count, max_uncommitted=1 << 30
    )
    openings = [_opening(i, engine.info.num_tokens, temperature) for i in range(count)]
    served = serve(verifier, openings, WARM_UP, STEPS)
    engine.overlaps = kept
    found = {("step", "ms"): 1e3 * served.seconds / STEPS, ("tokens/s", "tokens/s"): served.num_tokens / served.seconds}
    if device := [start.elapsed_time(end) for start, end in served.spans]:
        found |= {("device", "ms"): float(np.median(device)), ("busy", "%"): 0.1 * sum(device) / served.seconds}
    return found


def _opening(session_id: int, vocab: int, temperature: float) -> Open:
    token_ids = np.random.default_rng(session_id).integers(0, vocab, CONTEXT).astype(np.int32)
    params = SamplingParams(temperature=temperature, seed=session_id, ignore_eos=True)
    return Open(
        session_id=session_id,
        epoch=1,
        prompt_len=CONTEXT,
        tokens_left=2 * (WARM_UP + STEPS) + CONTEXT,
        params=params,
        speculation=Speculation(mode="plain"),
        token_ids=token_ids,
    )


def _turn(verifier: Verifier) -> None:
    """Run the loop's body, but for the sockets."""
    verifier.begin(time.monotonic())
    for message in verifier.step(time.monotonic).packed():
        encode(message)


def _num_tokens(verifier: Verifier) -> int:
    return sum(session.length for session in verifier.sessions.values())
