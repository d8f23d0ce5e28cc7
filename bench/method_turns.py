"""Methods of drafting take turns: each on processes of its own, all on the same prompts, block by block in rotating order.

Rules: no prompt that counts comes twice to a verifier, so that none is found in its KV memory (of which an EAGLE-3 head has no hidden states)
and no text is drafted from an earlier copy of itself. So each repetition has prompts of its own, all others are for warming up (what a method learns of
few texts says little of others), and for each temperature processes start anew. All processes of a temperature run at a time; whoever is not asked waits without work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle, groupby
from typing import Any

from bench.contestants import Specq
from bench.deployments import Deployments, Starter
from bench.measure import Turn, blocks
from bench.methods import Method, config_of
from bench.processes import cpu_seconds
from bench.settings import Settings
from specq.client import Client
from specq.processes.servers import Servers
from specq.protocol import ConfigError, EngineError
from specq.runtime import Tell
from specq.samples import Prompt

FRESH_S = 10.0  # within which a verifier's heartbeat must say what its last step did
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a verifier has counted of its steps: how many, the seconds of their forward passes, and those between them in which it drafts,
    receives and sends."""

    steps: int
    forward_s: float
    between_s: float

    def since(self, before: StepTimes) -> StepTimes:
        """Return what came after."""
        return StepTimes(
            self.steps - before.steps, self.forward_s - before.forward_s, self.between_s - before.between_s
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """The turns of all methods at one temperature; of each method its steps, and the processor seconds of its draft worker in its turns."""

    turns: list[Turn]
    steps: dict[str, StepTimes]
    worker_s: dict[str, float]


def portions(prompts: Sequence[Prompt], limit: int, least: int) -> list[list[Prompt]]:
    """Return lists of prompts with `limit` of each data set, none twice, as many as there are; raises ConfigError for a data set with fewer than `least`
    lists need."""
    groups = {dataset: list(group) for dataset, group in groupby(prompts, key=lambda prompt: prompt.dataset)}
    for dataset, own in groups.items():
        if len(own) < least * limit:
            raise ConfigError(
                f"{dataset} has {len(own)} prompts; {limit} for each repetition and for warming up are {least * limit}: "
                f"lower --limit or --repeats"
            )
    found: list[list[Prompt]] = [[] for _ in range(min(map(len, groups.values())) // limit)]
    for own in groups.values():
        for i, portion in enumerate(found):
            portion.extend(own[i * limit : (i + 1) * limit])
    return found


def measure_methods(
    methods: Sequence[Method],
    settings: Settings,
    warming: Sequence[Sequence[Prompt]],
    prompts: Sequence[Sequence[Prompt]],
    settle_s: float,
    deployments: Deployments,
    tell: Tell,
) -> Measured:
    """Start all methods, warm them up, and let them take turns on `prompts`: a list for each repetition. `warming`: lists of other prompts.

    settle_s   seconds of service, at least, in which a method that measures which drafts pay learns that
    """
    names = {f"{method.name} T={settings.temperature:g}": method for method in methods}
    running = deployments.serve({name: _starter(method, settings.model, tell) for name, method in names.items()})
    everybody = [_Served(method, running[name], settings) for name, method in names.items()]
    for served in everybody:
        served.settle(warming, settle_s, tell)
    before = {served.name: step_times(served.client) for served in everybody}
    turns = list(_turns(everybody, prompts, settings.concurrency, tell))
    after = {served.name: step_times(served.client).since(before[served.name]) for served in everybody}
    return Measured(turns, after, {served.name: served.worker_s for served in everybody if served.method.worker})


def _starter(method: Method, target: str, tell: Tell) -> Starter:
    @contextmanager
    def start() -> Iterator[Servers]:
        tell(f"starting {method.name}")
        with Servers(config_of(method, target)) as servers:
            yield servers

    return start


class _Served:
    """A method and its processes."""

    def __init__(self, method: Method, servers: Servers, settings: Settings) -> None:
        self.method, self.name, self.client = method, method.name, servers.client
        self._settings = settings
        self._workers = [pid for name, pid in servers.pids().items() if name.startswith("draft")]
        self.worker_s = 0.0

    def turn(self, prompts: Sequence[Prompt], repeat: int, tenant: str = "") -> Turn:
        """Complete some prompts. `tenant`: whose jobs they are; what ended jobs of others said is not drafted from."""
        options = {"mode": self.method.mode, "tenant": tenant}
        contestant = Specq(self.name, self.client, self._settings.concurrency, options)
        before, began = self._cpu_seconds(), time.perf_counter()
        completions = contestant.run(prompts, self._settings)
        seconds = time.perf_counter() - began
        self.worker_s += self._cpu_seconds() - before
        return Turn(self.name, repeat, tuple(prompts), completions, seconds)

    def _cpu_seconds(self) -> float:
        """Return what its draft workers have taken so far; 0 where there is no /proc."""
        return sum(cpu_seconds(pid) or 0.0 for pid in self._workers)

    def settle(self, warming: Sequence[Sequence[Prompt]], settle_s: float, tell: Tell) -> None:
        """Complete the first of these lists; all, again and again, for so long where it is to be learned which drafts pay."""
        tell(f"warming up {self.name}")
        end = time.perf_counter() + (settle_s if self.method.is_measured else 0.0)
        for number, prompts in enumerate(cycle(warming)):
            self.turn(prompts, -1, f"settling {number // len(warming)}" if number >= len(warming) else "")
            if time.perf_counter() >= end:
                break
        self.worker_s = 0.0


def _turns(
    everybody: Sequence[_Served], prompts: Sequence[Sequence[Prompt]], concurrency: int, tell: Tell
) -> Iterator[Turn]:
    """Yield everybody's turn on each block, each time beginning with the next one."""
    number = count()
    for repeat, portion in enumerate(prompts):
        for block in blocks(portion, concurrency):
            start = next(number) % len(everybody)
            turns = [served.turn(block, repeat) for served in (*everybody[start:], *everybody[:start])]
            yield from turns
            rates = ", ".join(f"{turn.contestant} {turn.num_tokens / turn.seconds:.0f}" for turn in turns)
            tell(f"{repeat + 1}/{len(prompts)} {block[0].dataset}, tokens/s: {rates}")


# --- what a verifier counts -------------------------------------------------------------------------------------------------


def step_times(client: Client) -> StepTimes:
    """Return what the verifier of a deployment has counted, all rounds that the broker knows included; raises EngineError if its
    heartbeat does not say so within FRESH_S."""
    end = time.monotonic() + FRESH_S
    while (found := _step_times(client.status())) is None:
        if time.monotonic() > end:
            raise EngineError(f"the verifier's heartbeats do not have all of its rounds after {FRESH_S:g} s")
        time.sleep(LOOK_S)
    return found


def _step_times(report: dict[str, Any]) -> StepTimes | None:
    """Return what a broker's report says of its one verifier; None where the heartbeat is older than the last round."""
    metrics = next((one.get("metrics") for one in report["workers"] if one["role"] == "target"), None)
    num_rounds = sum(one["rounds"] for one in report["rounds"].values())
    if not metrics or metrics["hits"] + metrics["misses"] < num_rounds:
        return None
    phases = metrics["step_us"]
    seconds = {name: sum(phase[:1]) / 1e6 for name, phase in phases.items()}
    return StepTimes(sum(phases["forward"][1:]), seconds["forward"], seconds["wait"] + seconds["host"])
