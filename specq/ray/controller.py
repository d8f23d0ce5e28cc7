"""The controller: an actor that compares the plan with what runs, and takes the next steps.

It keeps nothing. A new one finds the processes by the names of their actors, so it may die, and an upgrade is a
controller with another configuration. While there is none, Ray still restarts processes, and these still serve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import ray
import structlog
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, RayError

from specq.client import Client
from specq.config import Config
from specq.processes.up import WRONG_OPTIONS, keys_of_broker
from specq.protocol import ConfigError, JobError
from specq.ray.actors import NAMESPACE, PROGRAM, STOP_MARGIN_S, ProcessHealth, start
from specq.ray.plan import (
    READY,
    ROLES,
    STARTING,
    STOPPING,
    ClusterNode,
    Numbers,
    PlacedProcesses,
    ProcessSpec,
    Running,
    most_numbers,
    next_steps,
    plan,
    start_numbers,
)
from specq.ray.scaling import Sample, Scale, ScaleLimits, sample_of, scaled, without_room
from specq.transport import listens

log = structlog.get_logger(__name__)

NAME, FAILED = "controller", "failed"
LOOK_S = 0.5  # between two comparisons
ANSWER_S = 1.0  # for an actor, and for a broker
MOST_REASON = 500  # characters
SILENT_S = 30.0  # for an actor of a former controller


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A line of `specq ray status`. `reason`: why a process that is not ready ended, "" if it did not."""

    name: str
    state: str
    address: str = ""  # of its node
    pid: int = 0
    listens_at: str = ""
    age_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What the controller knows: its processes, the wanted numbers, and what has no place."""

    rows: tuple[ProcessRow, ...]
    numbers: Numbers
    waiting: Mapping[str, str]
    is_settled: bool
    num_nodes: int
    gains: Mapping[int, float]


class ClusterController:
    """Compares and acts twice a second, in a thread of its own."""

    def __init__(self, config: Config, only_at: str = "", program: Sequence[str] = PROGRAM) -> None:
        self.config, self.only_at, self.program = config, only_at, tuple(program)
        least, most = start_numbers(config), most_numbers(config)
        self.limits = ScaleLimits((least.target, most.target), (least.draft, most.draft), config.target.max_sessions)
        self.least, self.scale = least, Scale(least.target, least.draft)
        self.handles: dict[str, Any] = {}
        self.health: dict[str, ProcessHealth] = {}
        self.specs: dict[str, ProcessSpec] = {}  # of the handles; unknown for those of a former controller at first
        self.reasons: dict[str, str] = {}  # why a process ended last
        self.stopping: dict[str, Any] = {}  # name -> the call that stops it
        self._clients: dict[str, Client] = {}
        self._status = ClusterStatus((), least, {}, is_settled=False, num_nodes=0, gains={})
        self._ended, self._began = threading.Event(), time.monotonic()
        self._adopt()
        self._thread = threading.Thread(target=self._run, daemon=True, name="controller")
        self._thread.start()

    def __repr__(self) -> str:
        return NAME

    def _adopt(self) -> None:
        """Find the processes of a former controller, and begin with as many workers."""
        for name in (one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if _is_ours(one)):
            with suppress(ValueError):  # it has just ended
                self.handles[name] = ray.get_actor(name, NAMESPACE)
        there = {role: sum(name.startswith(f"{role}-") for name in self.handles) for role in ROLES}
        targets, drafters = (
            min(max(there[role], low), high)
            for role, (low, high) in (("target", self.limits.targets), ("draft", self.limits.drafters))
        )
        self.scale = Scale(targets, drafters)

    def status(self) -> ClusterStatus:
        return self._status

    def end(self) -> None:
        """Stop all processes: gateways first, brokers last."""
        self._ended.set()
        self._thread.join()
        for role in reversed(ROLES):
            names = [name for name in self.handles if name.startswith(f"{role}-")]
            for name in names:
                self._stop(name)
            while any(name in self.handles for name in names):
                self._reap()
                time.sleep(0.1)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - the head is away, say: what runs goes on, and so must this
                log.warning("ray_call_failed", reason=f"{type(error).__name__}: {error}"[:500])

    def _turn(self) -> None:
        nodes = living_nodes()
        self._look({node.node_id for node in nodes})
        if self.handles.keys() - self.specs.keys():
            self._give_up_silent()
            return
        reports = self._reports()
        numbers = replace(self.least, target=self.scale.targets, draft=self.scale.drafters)
        kept = {name: spec.node_id for name, spec in self.specs.items()}
        wanted = plan(self.config, nodes, numbers, kept, self.only_at)
        self.scale = without_room(self.scale, wanted.waiting, time.monotonic(), self.limits)
        present = self._present(reports)
        specs = {spec.name: spec for spec in wanted.processes}
        steps = next_steps(wanted.processes, present)
        for step, name in steps:
            if step == "stop":
                self._stop(name)
            elif name not in self.handles:
                self._start(specs[name])
        self._tell_brokers(specs)
        self._reap()
        is_settled = not steps and not wanted.waiting and all(one.state == READY for one in present.values())
        answered = len(reports) == numbers.broker
        if answered:
            found, now = sample_of(list(reports.values())), time.monotonic()
            self._scale(scaled(self.scale, found, now, self.limits, is_settled=is_settled), found)
        self._note(wanted, present, numbers, nodes, is_settled=is_settled and answered)

    def _scale(self, scale: Scale, sample: Sample) -> None:
        if (scale.targets, scale.drafters) != (self.scale.targets, self.scale.drafters):
            gains = {str(number): round(one, 3) for number, one in scale.gains.items()}
            numbers = {"targets": scale.targets, "drafters": scale.drafters}
            log.info("workers_scaled", **numbers, waiting=sample.waiting, running=sample.running, gains=gains)
        self.scale = scale

    # --- actors -------------------------------------------------------------------------------------------------------

    def _look(self, alive: set[str]) -> None:
        """Ask all actors. Forget an actor that Ray has given up, or whose node is dead."""
        asked = {name: handle.health.remote() for name, handle in self.handles.items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        for name, answer in asked.items():
            try:
                self.health[name] = ray.get(answer, timeout=0)
                self.specs[name] = self.health[name].spec
                self._note_end(name, self.health[name])
                if self.health[name].is_stopping:  # a former controller began it
                    self._stop(name)
            except (ActorDiedError, ActorUnschedulableError):
                self._forget(name)
            except (RayError, GetTimeoutError):  # it restarts, or its node is away
                self.health.pop(name, None)
                known = self.specs.get(name)
                if known is not None and known.node_id not in alive:
                    self._forget(name)

    def _note_end(self, name: str, health: ProcessHealth) -> None:
        """Keep why a process ended: its actor ends too, and its successor does not know it."""
        if health.status is not None:
            said = health.last_line.removeprefix("specq: ")[:MOST_REASON]
            self.reasons[name] = said or f"ended with status {health.status}"

    def _give_up_silent(self) -> None:
        """End actors of a former controller that do not answer: they have no place, or lost it."""
        if time.monotonic() > self._began + SILENT_S:
            for name in self.handles.keys() - self.specs.keys():
                self._forget(name)

    def _start(self, spec: ProcessSpec) -> None:
        with suppress(ValueError):  # Ray still has the name: the next turn tries again
            self.handles[spec.name] = start(spec, self.program)
            self.specs[spec.name] = spec
            log.info("process_placed", name=spec.name, node=spec.node_id[:12])

    def _stop(self, name: str) -> None:
        if name not in self.stopping:
            drain_s = max(self.config.broker.drain_seconds, self.config.target.drain_seconds)
            self.stopping[name] = self.handles[name].stop.remote(drain_s + STOP_MARGIN_S)

    def _reap(self) -> None:
        """End the actors whose processes have stopped."""
        for name, call in list(self.stopping.items()):
            ended, _ = ray.wait([call], timeout=0)
            if ended:
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Let Ray end an actor for good."""
        handle = self.handles.pop(name, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)
        for known in (self.health, self.specs, self.stopping, self.reasons):
            known.pop(name, None)

    def _tell_brokers(self, wanted: Mapping[str, ProcessSpec]) -> None:
        """Give workers the brokers' present addresses, for their next start."""
        for name, one in self.health.items():
            spec = wanted.get(name)
            if spec is not None and spec.brokers != one.spec.brokers:
                self.handles[name].use_brokers.remote(spec.brokers)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _reports(self) -> dict[str, dict[str, Any]]:
        """Return the report of each broker that answers, by its address."""
        addresses = {one.spec.address for one in self.health.values() if one.spec.role == "broker"}
        for gone in self._clients.keys() - addresses:
            self._clients.pop(gone).close()
        found = {}
        for address in addresses:
            with suppress(JobError, ConfigError):  # of keys that are not there; the broker says so itself
                if address not in self._clients:
                    keys = keys_of_broker(self.config.broker)
                    self._clients[address] = Client(address, timeout_s=ANSWER_S, keys=keys)
                found[address] = self._clients[address].status()
        return found

    def _present(self, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Running]:
        """Return the processes with their states. A worker is ready if it is at every broker that answers."""
        lists = [
            {one["name"]: one["registered_s_ago"] for one in report["workers"] if one["state"] == "ready"}
            for report in reports.values()
        ]
        return {name: Running(spec, self._state(name, spec, reports, lists)) for name, spec in self.specs.items()}

    def _state(
        self, name: str, spec: ProcessSpec, reports: Mapping[str, Any], lists: Sequence[Mapping[str, float]]
    ) -> str:
        one = self.health.get(name)
        if name in self.stopping:
            return STOPPING
        if one is None:
            return STARTING
        if one.status is not None:
            return f"{FAILED} with status {one.status}" if one.status == WRONG_OPTIONS else STARTING
        if spec.role == "broker":
            is_ready = spec.address in reports
        elif spec.role == "gateway":
            is_ready = listens(spec.address)
        else:
            is_ready = bool(lists) and all(ready.get(name, inf) <= one.age_s + ANSWER_S for ready in lists)
        return READY if is_ready else STARTING

    def _note(
        self, wanted: PlacedProcesses, present: Mapping[str, Running], numbers: Numbers, nodes: Sequence[ClusterNode],
        *, is_settled: bool,
    ) -> None:  # fmt: skip
        hosts = {node.node_id: node.address for node in nodes}
        rows = []
        for name, one in sorted(present.items(), key=lambda item: (ROLES.index(item[0].rpartition("-")[0]), item[0])):
            health = self.health.get(name)
            pid, age_s = (health.pid, health.age_s) if health else (0, 0.0)
            if one.state == READY:
                self.reasons.pop(name, None)
            shown = (hosts.get(one.spec.node_id, ""), pid, self._shown(one.spec), age_s, self.reasons.get(name, ""))
            rows.append(ProcessRow(name, one.state, *shown))
        gains = dict(self.scale.gains)
        self._status = ClusterStatus(tuple(rows), numbers, dict(wanted.waiting), is_settled, len(nodes), gains)

    def _shown(self, spec: ProcessSpec) -> str:
        """Return the address as clients name it."""
        scheme = "https" if self.config.serve.tls_cert else "http"
        return spec.address.replace("tcp", scheme, 1) if spec.role == "gateway" else spec.address


def _is_ours(named: Mapping[str, str]) -> bool:
    name = named["name"]
    return named["namespace"] == NAMESPACE and name is not None and name.rpartition("-")[0] in ROLES


def living_nodes() -> list[ClusterNode]:
    """Return the nodes of the cluster that are alive."""
    return [
        ClusterNode(one["NodeID"], one["NodeManagerAddress"], *(one["Resources"].get(n, 0.0) for n in ("CPU", "GPU")))
        for one in ray.nodes()
        if one["Alive"]
    ]
