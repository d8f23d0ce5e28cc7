"""One scenario, from the first job to the figures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from specq.protocol import ModelInfo, Speculation
from specq.simulate.figures import CLIENT, Counts, Figures, Users, figures
from specq.simulate.machine import LineSettings
from specq.simulate.settings import NetworkSettings, Scenario, TrafficSettings
from specq.simulate.stub_drafter import TimedProposer
from specq.simulate.stubs import (
    Choices,
    RecordedGuesses,
    RecordedText,
    StubGuesses,
    StubText,
    Texts,
    TimedEngine,
)
from specq.simulate.world import SimulatedWorld
from specq.verifier import step_curves

_BOOT_S = 1.0  # workers register before the first job arrives
_MAX_LENGTH = 2**31 - 1
_BITS = 1e6 / 8  # bytes in a megabit
_MOST_DRAIN_S = 86_400.0


@dataclass(frozen=True, slots=True)
class SimulatedSpeed:
    """The processor time of the simulator itself. It is not part of the figures, because it differs from run to run."""

    cpu_s: float
    num_events: int

    @property
    def events_per_s(self) -> float:
        return self.num_events / self.cpu_s if self.cpu_s else 0.0


class Simulation:
    """A scenario's world, its stubs and its users."""

    def __init__(self, scenario: Scenario, texts: Texts = (), choices: Choices = ()) -> None:
        """Build the world of a scenario.

        texts     texts of a real target, instead of made-up ones. Their prompts have been computed before.
        choices   a real drafter's choices for them, position by position, instead of made-up guesses.
        """
        self.scenario, self._choices = scenario, choices
        traffic, network = scenario.traffic, scenario.network
        self.text = RecordedText(texts, traffic.seed) if texts else StubText(traffic.seed)
        self.world = SimulatedWorld(
            seed=traffic.seed,
            host=scenario.host,
            machine=scenario.machine,
            heartbeat_ms=network.heartbeat_ms,
            liveness_ms=6 * network.heartbeat_ms + int(2 * network.rtt_ms),
            max_jobs=10_000_000,
        )
        self.users = Users(self.world, scenario, self.text)
        self.engines = [self._add_verifier(i) for i in range(scenario.engine.verifiers)]
        self.proposers = [self._add_drafter(i) for i in range(scenario.draft.drafters)]
        self.world.add_client(CLIENT, self.users.hear, _near(network))

    def _add_verifier(self, number: int) -> TimedEngine:
        settings = self.scenario.engine
        engine = TimedEngine(
            settings,
            self.text,
            self._info("stub-target"),
            self.scenario.host.plan_us,
            knows_prompts=isinstance(self.text, RecordedText),
        )
        sizes = [int(rows) for rows, _ in settings.step_ms]
        unhelped, curve = step_curves(engine, sizes)
        self.world.add_verifier(
            f"target-{number}".encode(),
            engine,
            curve,
            _near(self.scenario.network),
            unhelped_curve=unhelped,
            max_sessions=settings.max_sessions,
            max_step_rows=settings.max_step_rows,
        )
        return engine

    def _add_drafter(self, number: int) -> TimedProposer:
        settings = self.scenario.draft
        model = number % settings.models
        guesses = (
            RecordedGuesses(self.text, self._choices, settings.ranks)
            if self._choices
            else StubGuesses(self.text, settings.acceptance, settings.ranks, settings.claims, model)
        )
        proposer = TimedProposer(settings, guesses, self._info(f"stub-draft-{model}"))
        options = {name: getattr(settings, name) for name in ("width", "fan_out", "max_ahead", "chain")}
        self.world.add_drafter(f"draft-{number}".encode(), proposer, _far(self.scenario.network), **options)
        return proposer

    def _info(self, name: str) -> ModelInfo:
        vocab = self.text.vocab_size
        return ModelInfo(
            name=name,
            fingerprint=name,
            dtype="none",
            engine="stub",
            vocab_size=vocab,
            num_tokens=vocab,
            eos_ids=(0,),
            max_length=_MAX_LENGTH,
            tokenizer_hash="stub",
            kv_slots=self.scenario.engine.kv_slots,
        )

    def run(self, *, drain: bool) -> Figures:
        """Warm up, measure, and return the figures.

        drain: also let the jobs in flight end, and those of num_jobs that have not begun.
        """
        traffic, queue = self.scenario.traffic, self.world.queue
        queue.run(_BOOT_S)
        self.users.start()
        queue.run(traffic.warm_s)
        before, num_before = self.counts(), len(self.users.finished)
        queue.run(traffic.seconds)
        counts, jobs = self.counts().since(before), self.users.finished[num_before:]
        in_flight = len(self.users.jobs)
        if drain:
            self.users.open = traffic.num_jobs > 0
            queue.run_until(lambda: self.users.done, _MOST_DRAIN_S)
        return figures(traffic.seconds, counts, jobs, in_flight, (len(self.engines), len(self.proposers)))

    def run_jobs(self, traffic: TrafficSettings, speculation: Speculation) -> float:
        """Serve all of `num_jobs`, starting from an idle system.

        Returns the seconds from the first submission to the last token. The processes keep what they have learned for
        the next jobs.
        """
        queue = self.world.queue
        queue.run(_BOOT_S)
        began = queue.now
        self.users.ask(traffic, speculation)
        self.users.start()
        queue.run_until(lambda: self.users.done, _MOST_DRAIN_S)
        return queue.now - began

    def metrics(self) -> dict[str, Any]:
        """Return the step counts of the first verifier, as in its heartbeats."""
        beat = self.world.processes[b"target-0"].worker.heartbeat()
        return deepcopy({**beat.metrics, "steps": beat.steps})

    def counts(self) -> Counts:
        """Return the counts so far."""
        engines, proposers = self.engines, self.proposers
        far = [self.world.lines[f"draft-{i}".encode()] for i in range(len(proposers))]
        return Counts(
            tokens=self.users.num_tokens,
            rounds=sum(engine.num_rounds for engine in engines),
            nodes=sum(engine.num_nodes for engine in engines),
            accepted=sum(engine.num_accepted for engine in engines),
            steps=sum(engine.num_steps for engine in engines),
            rows=sum(engine.num_rows for engine in engines),
            passes=sum(proposer.num_passes for proposer in proposers),
            engine_s=sum(engine.computed_s for engine in engines),
            draft_s=sum(proposer.busy_s for proposer in proposers),
            draft_bytes=sum(up.num_bytes for up, _ in far),
            verdict_bytes=sum(down.num_bytes for _, down in far),
        )


def simulate(scenario: Scenario, *, drain: bool = False) -> Figures:
    """Run a scenario and return its figures; equal scenarios give equal figures.

    `drain` lets all jobs end after the measured time, also those of `num_jobs`. Their texts are checked like the
    others.
    """
    return simulate_timed(scenario, drain=drain)[0]


def simulate_timed(
    scenario: Scenario, *, drain: bool = False, clock: Callable[[], float] = time.process_time
) -> tuple[Figures, SimulatedSpeed]:
    """Run a scenario; return its figures, and the simulator's speed."""
    with calm_collector():
        started = clock()
        simulation = Simulation(scenario)
        found = simulation.run(drain=drain)
        return found, SimulatedSpeed(clock() - started, simulation.world.queue.num_events)


@contextmanager
def calm_collector() -> Iterator[None]:
    """Let Python's cycle collector run rarely, as the processes do, because there are few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _near(network: NetworkSettings) -> LineSettings:
    return LineSettings(delay_s=network.near_rtt_ms / 2000)


def _far(network: NetworkSettings) -> LineSettings:
    return LineSettings(
        delay_s=network.rtt_ms / 2000,
        jitter_s=network.jitter_ms / 1000,
        bytes_per_s=network.bandwidth_mbit * _BITS,
        loss=network.loss,
    )
