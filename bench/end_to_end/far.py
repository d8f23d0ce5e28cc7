"""Draft workers far from the verifier: small drafters on CPU cores behind a delay proxy, and the large target.

The target is on its device. `far` runs draft workers as processes, each on a core of its own. All are `rtt_ms` away,
one delay after the other.

Rule: plain decoding and drafting take turns on the same processes, seconds apart, and a ratio is of two such turns.
Turns are about as long at each load, so that one session is measured as precisely as many. A broker and a verifier
start once. Draft workers and the proxy start again for each delay.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.calibrate.serving import Service, proxy
from bench.end_to_end.serving import READY_S, Completer, speculation, verifier_config
from bench.end_to_end.streams import ListeningClient, Repetitions, Stream, StreamLoad, keeping
from bench.end_to_end.workload import WARM_LEN, Workload
from bench.figures import paired
from bench.report import attempt, tell
from bench.suite import COUNT, option, options, repeatable
from bench.turns import rotated
from specq.config import Config, to_arguments
from specq.processes.servers import Servers
from specq.processes.up import Group, Member
from specq.protocol import EngineError
from specq.runtime import Number, available_cores

PLAIN, DRAFTED = "plain", "async"
VERIFIER_CORES, OTHER_CORES = 2, 2  # OTHER_CORES: for the broker, and for this process with its proxy
GONE_S, POLL_S = 30.0, 0.1

far_options = options(
    option("--far-drafters", COUNT, 12, "Number of draft workers of `far`."),
    option("--far-model", str, "tiny", "Draft model of `far`. It has the pair's tokenizer and is not inflated."),
    repeatable(
        "--rtt-ms", Number(0), (1.0, 20.0, 50.0), "Round trip of `far` draft workers to the broker in ms (0: no proxy)."
    ),
    option("--turn-s", Number(0), 0.6, "Minimum seconds of a turn of `far`. Its jobs repeat until then."),
)


@dataclass(frozen=True, slots=True)
class FarSettings:
    """The number and model of draft workers, how far away they are, and the minimum length of a turn."""

    drafters: int
    model: str
    rtt_ms: tuple[float, ...]
    turn_s: float = 0.0


def measure_far(settings: FarSettings, work: Workload) -> dict[str, Any]:
    """Return {"plain 20 ms", "async 20 ms" and so on: {load: figures}}; if a delay fails, the others continue."""
    cores = Cores.of(available_cores(), settings.drafters)
    found: dict[str, Any] = {}
    config = cores.given(verifier_config(work, ""))
    with Servers(config) as servers, ListeningClient(servers.address) as client, keeping(found):
        servers.wait_ready(READY_S)
        for rtt_ms in settings.rtt_ms:
            name = f"{rtt_ms:g} ms"
            runs = _at(rtt_ms, settings, work, servers, client, cores)
            failed = attempt(f"far {name}", partial(_add, runs, found, f" {name}"))
            if failed:
                found[f"error {name}"] = failed["error"]
    return found


def _add(runs: Iterable[tuple[StreamLoad, Mapping[str, Any]]], found: dict[str, Any], suffix: str = "") -> None:
    """Add the figures of each load, by variant, as they arrive."""
    for load, by_variant in runs:
        for variant, one in by_variant.items():
            found.setdefault(f"{variant}{suffix}", {})[load.key] = one


# --- one delay ------------------------------------------------------------------------------------------------------


def _at(
    rtt_ms: float, settings: FarSettings, work: Workload, servers: Servers, client: ListeningClient, cores: Cores
) -> Iterator[tuple[StreamLoad, dict[str, Any]]]:
    """Start draft workers `rtt_ms` away, and yield {variant: figures} of each load."""
    with ExitStack() as stack:
        address = stack.enter_context(proxy(servers.address, rtt_ms)) if rtt_ms else servers.address
        stack.callback(_wait_until_gone, servers)
        workers = stack.enter_context(Group(_members(servers.config, address, settings, cores)))
        workers.wait_ready(READY_S)
        servers.client.wait_until_ready(num_targets=1, num_drafters=settings.drafters, timeout_s=READY_S)
        service = Service(servers.client, {})
        for load in work.loads:
            yield load, _in_turns(client, service, work, load, settings.turn_s)


def _members(config: Config, address: str, settings: FarSettings, cores: Cores) -> list[Member]:
    """Return the draft workers, which find the broker at the address."""
    found = []
    for number, core in enumerate(cores.drafters, 1):
        name = f"far-{number}"
        section = replace(
            config.draft,
            broker=address,
            name=name,
            model=settings.model,
            device="cpu",
            cores=(core,),
            threads=1,
            nice=0,
        )
        arguments = ("worker", "--role", "draft", *to_arguments(section), "--log-level", "warning")
        # the first one's `about` is the address where the group asks for readiness: the broker itself
        found.append(Member(name, arguments, (core,), config.broker.bind))
    return found


def _wait_until_gone(servers: Servers) -> None:
    """Wait until the broker knows no draft workers, so that the next delay starts without old ones."""
    deadline = time.monotonic() + GONE_S
    while any(worker["role"] == "draft" for worker in servers.client.status()["workers"]):
        if time.monotonic() > deadline:
            raise EngineError(f"draft workers that have ended are still known after {GONE_S:g} s")
        time.sleep(POLL_S)


# --- turns ----------------------------------------------------------------------------------------------------------


def _in_turns(
    client: ListeningClient, service: Service, work: Workload, load: StreamLoad, turn_s: float
) -> dict[str, dict[str, Any]]:
    """Return the figures of plain decoding and of drafting, which take turns.

    drafted_per_second   nodes that all draft workers made, while drafting had its turns.
    stale_share          share of the nodes at the verifier that the text contradicted or that were cut.
    to_plain, interval   median of the ratios of two turns, and its bootstrap confidence interval.
    """
    prompts = work.prompts_for(load.sessions)[: work.jobs_each * load.sessions]
    modes = {mode: Completer(client, load, work, mode) for mode in (PLAIN, DRAFTED)}
    turns = {mode: Repetitions(load) for mode in modes}
    modes[PLAIN].complete(prompts, WARM_LEN)
    work.settle(prompts, modes[DRAFTED].complete)
    _, before = service.counts()
    for number in range(work.repeats):
        for mode in rotated((PLAIN, DRAFTED), number):
            turns[mode].add(partial(_turn, modes[mode], prompts, work.output_len, turn_s))
    _, after = service.counts()
    found = {mode: turns[mode].figures() | speculation(modes[mode].results) for mode in modes}
    found[DRAFTED] |= _to_plain(turns[DRAFTED], turns[PLAIN])
    rate, ratio, interval = (found[DRAFTED][name] for name in ("tokens_per_second", "to_plain", "interval"))
    tell(f"{load.key}: {rate:.0f} tokens/s, {ratio:.3f} of plain, {interval[0]:.3f} to {interval[1]:.3f}")
    nodes = after["draft_nodes"] - before["draft_nodes"]
    return found | {
        DRAFTED: found[DRAFTED]
        | {
            "stale_share": round(found[DRAFTED]["stale"] / max(found[DRAFTED]["drafted"], 1), 3),
            "drafted_per_second": round(nodes / turns[DRAFTED].seconds),
        }
    }


def _turn(completer: Completer, prompts: list[list[int]], num_tokens: int, seconds: float) -> list[Stream]:
    """Complete all prompts, and again until the seconds are over."""
    until, found = time.monotonic() + seconds, completer.complete(prompts, num_tokens)
    while time.monotonic() < until:
        found += completer.complete(prompts, num_tokens)
    return found


def _to_plain(drafted: Repetitions, plain: Repetitions) -> dict[str, Any]:
    found = paired(drafted.rates, plain.rates)
    return {"to_plain": found["median"], "interval": found["interval"], "ratios": found["ratios"]}


# --- cores ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of the verifier and of the broker, and the core of each draft worker."""

    verifier: tuple[int, ...]
    broker: tuple[int, ...]
    drafters: tuple[int, ...]

    @staticmethod
    def of(here: tuple[int, ...], drafters: int) -> Cores:
        """Divide the cores: one for each draft worker, if enough are left for the others; else workers share cores."""
        num_others = min(VERIFIER_CORES + OTHER_CORES, max(len(here) // 2, 1))
        verifier = here[: max(num_others - OTHER_CORES, 1)]
        rest = here[num_others:] or here
        return Cores(
            verifier,
            here[len(verifier) : num_others][:1] or verifier,
            tuple(rest[i % len(rest)] for i in range(drafters)),
        )

    def given(self, config: Config) -> Config:
        """Return a configuration that pins the broker and the verifier to their cores."""
        broker, target = replace(config.broker, cores=self.broker), replace(config.target, cores=self.verifier)
        return replace(config, broker=broker, target=target)
