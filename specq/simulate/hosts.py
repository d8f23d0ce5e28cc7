"""What the processes themselves take on this machine: the real code, timed while a small scenario is simulated.

The stubs' own time is taken off. Sockets are no part of it; `specq bench calibrate` adds them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from specq.drafting import Drafter
from specq.protocol import Draft, Message, Verdict, decode, encode
from specq.simulate.run import Simulation
from specq.simulate.settings import Scenario

_SAMPLES = 300  # messages of a kind that are encoded and decoded again

Clock = Callable[[], float]


class _Stopwatch:
    """Seconds that calls take, by name; the time of stubs inside them is taken off."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)  # name -> (size, seconds)
        self._stub_s = 0.0

    def watch(self, owner: Any, method: str, name: str, size: Callable[[Any, Any], int]) -> None:
        """Time a method of an object; `size(argument, result)` counts what it handled, and 0 is not noted."""
        call = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            before, started = self._stub_s, self.clock()
            result = call(*arguments)
            seconds = self.clock() - started - (self._stub_s - before)
            count = size(arguments[0] if arguments else None, result)
            if count:
                self.times[name].append((count, seconds))
            return result

        setattr(owner, method, timed)

    def leave_out(self, stub: Any, method: str) -> None:
        """Take a stub's method off whatever calls it."""
        call = getattr(stub, method)

        def timed(*arguments: Any) -> Any:
            started = self.clock()
            result = call(*arguments)
            self._stub_s += self.clock() - started
            return result

        setattr(stub, method, timed)

    def each_us(self, name: str) -> float:
        """Return the median microseconds for one of what was handled; 0 if nothing was."""
        return 1e6 * median([seconds / count for count, seconds in self.times[name]] or [0.0])

    def line_us(self, name: str) -> tuple[float, float]:
        """Return (microseconds for a call, and for each of what it handles): a line through the medians by size."""
        by_size: defaultdict[int, list[float]] = defaultdict(list)
        for count, seconds in self.times[name]:
            by_size[count].append(seconds)
        if len(by_size) < 2:
            return self.each_us(name), 0.0
        weights = np.sqrt([len(times) for times in by_size.values()])
        slope, start = np.polyfit(list(by_size), [median(times) for times in by_size.values()], 1, w=weights)
        return max(1e6 * float(start), 0.0), max(1e6 * float(slope), 0.0)


def measure_host(scenario: Scenario, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Return the keys of HostSettings in microseconds: medians over what happens in the scenario.

    A session's share of planning a step is in `verdict_us`.
    """
    simulation, watch = Simulation(scenario), _Stopwatch(clock)
    messages = _watch_all(simulation, watch)
    simulation.run(drain=False)
    draft, graft = watch.line_us("draft")
    coded = {kind: _codec_us([m for m in messages if isinstance(m, kind)], clock) for kind in (Draft, Verdict)}
    found = {
        "broker_us": watch.each_us("broker"),
        "draft_us": draft + coded[Draft][1],
        "graft_us": graft,
        "plan_us": 0.0,
        "verdict_us": watch.each_us("step") + coded[Verdict][0],
        "hear_us": watch.each_us("hear") + coded[Verdict][1],
        "pass_us": watch.each_us("pass"),
        "send_us": coded[Draft][0],
    }
    return {name: round(value, 2) for name, value in found.items()}


class _Passes:
    """Counts the passes of a drafter since the last call, and collects its drafts."""

    def __init__(self, drafter: Drafter, drafts: list[Message]) -> None:
        self._drafter, self._drafts, self._num_known = drafter, drafts, drafter.num_passes

    def __call__(self, _: Any, result: Sequence[Message]) -> int:
        self._drafts.extend(result)
        num_new, self._num_known = self._drafter.num_passes - self._num_known, self._drafter.num_passes
        return num_new


def _watch_all(simulation: Simulation, watch: _Stopwatch) -> list[Message]:
    """Time all that the scenario's processes do; return the list in which their drafts and verdicts will be."""
    messages: list[Message] = []

    def noted(_: Any, result: Sequence[Message]) -> int:
        messages.extend(result)
        return len(result)

    for method in ("from_front", "from_back"):
        watch.watch(simulation.world.broker, method, "broker", lambda *_: 1)
    for engine in simulation.engines:
        watch.leave_out(engine, "step")
    for proposer in simulation.proposers:
        watch.leave_out(proposer, "expand")
    for process in simulation.world.processes.values():
        if process.hello.role == "target":
            watch.watch(process.worker, "handle", "draft", lambda m, _: len(m.token_ids) if isinstance(m, Draft) else 0)
            watch.watch(process.worker, "step", "step", noted)
        else:
            watch.watch(process.worker, "handle", "hear", lambda m, _: int(isinstance(m, Verdict)))
            watch.watch(process.worker, "step", "pass", _Passes(process.worker, messages))
    return messages


def _codec_us(messages: Sequence[Message], clock: Clock) -> tuple[float, float]:
    """Return the median microseconds to (encode, decode) one of the messages; zeros if there are none."""
    times: tuple[list[float], list[float]] = ([0.0], [0.0])
    for message in messages[:_SAMPLES]:
        started = clock()
        frames = encode(message)
        encoded = clock()
        decode(frames)
        times[0].append(encoded - started)
        times[1].append(clock() - encoded)
    return 1e6 * median(times[0]), 1e6 * median(times[1])
