"""A deployment on a Ray cluster of several nodes on this machine, whose nodes and actors are killed under load.

    scripts/cluster.sh python -m tests.chaos.ray --actors 60 --nodes 30 --out ray.json
    scripts/cluster.sh python -m tests.chaos.ray --head redis --out head.json

Clients write down what they see, and `tests.chaos.history` says what is wrong with that. `--head` kills the head node
instead: `redis` keeps its state, `memory` does not. The exit status is 0 iff nothing was lost, doubled or wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click

from specq import Client
from specq.config.values import free_address
from specq.testing import wait_until
from tests.chaos.cluster import audit, conclude, is_whole
from tests.chaos.history import check
from tests.chaos.load import Load
from tests.chaos.processes import toy_prompts
from tests.journal.cluster import running
from tests.ray.cluster import NOTICE, RayCluster, socket_of

JOBS = 4
LIMIT_S = 90.0  # for all to be well again
RATE_S = 4.0
TOKENS = 150
CONFIG = """
[broker]
bind = "tcp://127.0.0.1:{port}"
journal = "postgresql://postgres@127.0.0.1:{database_port}/{database}"
heartbeat_ms = 250
liveness_ms = 3000
[target]
max_sessions = {max_sessions}
[up]
targets = {targets}
drafters = {drafters}
[ray]
brokers = {brokers}
max_drafters = {max_drafters}
"""


class RayDeployment:
    """What the audit and the load need to know of it, and its configuration."""

    def __init__(
        self, directory: Path, *, brokers: int = 2, targets: int = 2, drafters: int = 4, max_drafters: int = 0
    ) -> None:
        self.directory, self.histories = directory, directory / "histories"
        self.histories.mkdir()
        first = int(free_address().rpartition(":")[2])
        self.addresses = [f"tcp://127.0.0.1:{first + i}" for i in range(brokers)]
        self.address = ",".join(self.addresses)
        servers = running()
        self._values = {
            "port": first, "database": servers.new_database().name, "database_port": servers.primary.port,
            "brokers": brokers, "targets": targets, "drafters": drafters, "max_sessions": 64,
            "max_drafters": max_drafters,
        }  # fmt: skip
        self.config = directory / "specq.toml"
        self.write()

    def write(self, **changes: int) -> None:
        """Write the configuration."""
        self._values |= changes
        self.config.write_text(CONFIG.format(**self._values))

    @property
    def num_processes(self) -> int:
        return sum(self._values[name] for name in ("brokers", "targets", "drafters"))

    @contextmanager
    def load(self, jobs: int = JOBS, *, writes: bool = True) -> Iterator[Load]:
        """Keep so many jobs under way, and a process of clients that write down what they see, if it `writes`."""
        ours = (sys.executable, "-m", "tests.chaos.clients", self.address, str(self.histories), "client")
        with ExitStack() as stack:
            clients = [
                stack.enter_context(Client(",".join(order), timeout_s=120.0, cache_dir=self.directory / "cache"))
                for order in (self.addresses, self.addresses[::-1])
            ]
            if writes:
                scribe = stack.enter_context(
                    subprocess.Popen(ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                )
                stack.callback(scribe.kill)
            with Load(clients, toy_prompts(TOKENS), jobs) as load:
                wait_until(lambda: load.tally.arrivals, LIMIT_S)
                yield load
                load.finish(120.0)


@dataclass
class RayTimes:
    """Seconds: until Ray noticed a dead node; from then, or from an actor's death, until all was well again."""

    notices: list[float] = field(default_factory=list)
    node_recoveries: list[float] = field(default_factory=list)
    actor_recoveries: list[float] = field(default_factory=list)
    standstills: list[float] = field(default_factory=list)  # of the slowest job, from the death on
    rates: list[tuple[float, float]] = field(default_factory=list)  # tokens a second before, and when all is well
    stuck: list[str] = field(default_factory=list)


class RayInjector:
    """Kills actors and nodes of a deployment, and notes the times."""

    def __init__(self, cluster: RayCluster, deployed: RayDeployment, load: Load, seed: int) -> None:
        self.cluster, self.deployed, self.load = cluster, deployed, load
        self.rng, self.times = random.Random(seed), RayTimes()

    def __call__(self, kind: str) -> None:
        before = self._pids()
        start = time.monotonic()
        rate = self.load.tally.rate(start - RATE_S, start)
        if kind == "node":
            died, gone, since = self._kill_node(before)
        else:
            died, gone, since = self._kill_actor(before)
        took = self._wait(gone, before, since)
        if took is None:
            self.times.stuck.append(f"{kind} {', '.join(sorted(gone))}")
            return
        (self.times.node_recoveries if kind == "node" else self.times.actor_recoveries).append(took)
        slowest = self.load.recovered(died, LIMIT_S)
        self.times.standstills.append(LIMIT_S if slowest is None else slowest)
        if kind == "node":
            time.sleep(RATE_S)
            now = time.monotonic()
            self.times.rates.append((rate, self.load.tally.rate(now - RATE_S, now)))
            self.cluster.add_node()

    def _kill_node(self, before: dict[str, int]) -> tuple[float, set[str], float]:
        """Kill a node with processes; return when, whose processes died, and when Ray noticed."""
        raylets = {name: _parent(_parent(pid)) for name, pid in before.items()}
        raylet = self.rng.choice(sorted({one for one in raylets.values() if one in self.cluster.raylets}))
        socket = socket_of(raylet)
        self.cluster.kill_node(raylet)
        died = time.monotonic()
        wait_until(lambda: socket not in living_sockets(), LIMIT_S)
        self.times.notices.append(time.monotonic() - died)
        return died, {name for name, one in raylets.items() if one == raylet}, time.monotonic()

    def _kill_actor(self, before: dict[str, int]) -> tuple[float, set[str], float]:
        """Kill the process of an actor, now and then the controller's."""
        name = self.rng.choice([*before, "controller"])
        pid = self._controller() if name == "controller" else _parent(before[name])
        os.kill(pid, signal.SIGKILL)
        return time.monotonic(), {name} & before.keys(), time.monotonic()

    def _controller(self) -> int:
        """Return the controller's process: a child of one of our raylets."""
        for one in (one for one in Path("/proc").iterdir() if one.name.isdecimal()):
            with suppress(OSError):
                title = (one / "cmdline").read_text("utf-8", "replace")
                if title.startswith("ray::ClusterController") and _parent(int(one.name)) in self.cluster.all_raylets:
                    return int(one.name)
        raise AssertionError("there is no controller")

    def _pids(self) -> dict[str, int]:
        from specq.ray import deployment

        found: dict[str, int] = {}
        wait_until(lambda: found.update(_settled(deployment.status(), self.deployed)) or found, LIMIT_S)
        return found

    def _wait(self, gone: set[str], before: dict[str, int], since: float) -> float | None:
        """Wait until all processes are ready, and those that died are others; return the seconds."""
        from specq.ray import deployment

        while time.monotonic() < since + LIMIT_S:
            found = _settled(deployment.status(), self.deployed)
            if found and not any(found[name] == before[name] for name in gone):
                return time.monotonic() - since
            time.sleep(0.1)
        return None


def _settled(found: Any, deployed: RayDeployment) -> dict[str, int]:
    """Return the process ids, or {} while not all are ready."""
    is_whole = found.is_settled and len(found.rows) == deployed.num_processes
    return {row.name: row.pid for row in found.rows} if is_whole else {}


def living_sockets() -> set[str]:
    """Return the sockets of the raylets that Ray believes to be alive."""
    import ray

    return {one["RayletSocketName"] for one in ray.nodes() if one["Alive"]}


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    return 0


def siege(
    directory: Path,
    faults: Sequence[str],
    *,
    nodes: int = 5,
    seed: int = 0,
    seconds: float = 1e9,
    drafters: int = 4,
    at_end: Callable[[RayDeployment, RayCluster], None] = lambda *_: None,
) -> dict[str, Any]:
    """Run a deployment under load, and kill what the faults say; return what came of it.

    `at_end`: what to do with the deployment, still under load.
    """
    from specq.config import load as read
    from specq.ray import deployment
    from tests.ray.deploy import PROGRAM, READY_S

    deployed, until = RayDeployment(directory, drafters=drafters), time.monotonic() + seconds
    with RayCluster(nodes) as cluster, deployment.connected():
        deployment.up(read(deployed.config), lambda _: None, PROGRAM, READY_S)
        with deployed.load() as load:
            inject = RayInjector(cluster, deployed, load, seed)
            done = 0
            for kind in faults:
                if time.monotonic() > until:
                    break
                inject(kind)
                done += 1
            at_end(deployed, cluster)
        history = audit(deployed.histories, deployed.address)
        deployment.down()
    return report(faults[:done], inject.times, load, check(history), len(history))


def report(faults: Sequence[str], times: RayTimes, load: Load, wrong: list[str], operations: int) -> dict[str, Any]:
    """Return all figures."""
    counts = load.tally.counts
    figures: dict[str, Any] = {
        "faults": {kind: faults.count(kind) for kind in sorted(set(faults))},
        "jobs": counts["jobs"],
        **{name: counts[name] for name in ("lost", "doubled", "wrong", "refused")},
        "failures": load.tally.failures[:5],
        "stuck": times.stuck,
        "history": {"operations": operations, "wrong": len(wrong), "first": wrong[:10]},
        "settings": json.loads(NOTICE),
    }
    for name in ("notices", "node_recoveries", "actor_recoveries", "standstills"):
        found = getattr(times, name)
        figures |= {f"{name}_p50_s": round(median(found), 2), f"{name}_max_s": round(max(found), 2)} if found else {}
    if times.rates:
        before, after = (median(one[i] for one in times.rates) for i in (0, 1))
        figures |= {"rate_before": round(before, 1), "rate_after": round(after, 1)}
    return figures


# --- the head ---------------------------------------------------------------------------------------------------------


@contextmanager
def redis_server() -> Iterator[str]:
    """Run a Redis on a free port; yield HOST:PORT."""
    port = free_address().rpartition(":")[2]
    command = ("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def deploy(*arguments: str) -> dict[str, Any]:
    """Run `tests.ray.deploy`; return what it says as JSON, or {}."""
    command = (sys.executable, "-m", "tests.ray.deploy", *arguments)
    done = subprocess.run(command, capture_output=True, timeout=300, check=False, text=True)
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout) if arguments[0] == "status" else {}
    return found


def behead(directory: Path, kind: str, *, nodes: int = 3, away_s: float = 20.0) -> dict[str, Any]:
    """Kill the head under load, and start it again; return what came of it. `kind`: redis or memory."""
    deployed, figures = RayDeployment(directory, drafters=2), dict[str, Any](head=kind)
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server()) if kind == "redis" else ""
        cluster = stack.enter_context(RayCluster(nodes, redis=redis))
        deploy("up", str(deployed.config))
        with deployed.load() as load:
            time.sleep(RATE_S)
            died = time.monotonic()
            figures["rate_before"] = round(load.tally.rate(died - RATE_S, died), 1)
            cluster.kill_head()
            time.sleep(away_s)
            now = time.monotonic()
            figures["rate_without_head"] = round(load.tally.rate(now - RATE_S, now), 1)
            if kind == "redis":
                cluster.start_head()
                figures |= _after_redis(cluster, load)
            else:
                wait_until(lambda: not any(map(cluster.is_alive, cluster.raylets)), 180.0)
                figures["nodes_ended_s"] = round(time.monotonic() - died, 1)
                cluster.raylets.clear()
                cluster.start_head()
                for _ in range(nodes):
                    cluster.add_node()
                start = time.monotonic()
                deploy("up", str(deployed.config))
                figures["up_again_s"] = round(time.monotonic() - start, 1)
            start = time.monotonic()
            took = load.recovered(start, LIMIT_S)
            figures["all_advance_s"] = took and round(took, 2)
        history = audit(deployed.histories, deployed.address)
        deploy("down")
    return report([], RayTimes(), load, check(history), len(history)) | figures


def _after_redis(cluster: RayCluster, load: Load) -> dict[str, Any]:
    """Return whether the controller works again: it replaces an actor that is killed."""
    start, found = time.monotonic(), dict[str, Any]()
    while not found.get("is_settled") and time.monotonic() < start + LIMIT_S:
        with suppress(AssertionError):
            found = deploy("status")
    controlled_s = time.monotonic() - start
    row = next(one for one in found["rows"] if one["name"].startswith("draft"))
    os.kill(_parent(row["pid"]), signal.SIGKILL)
    start, new = time.monotonic(), found
    while time.monotonic() < start + LIMIT_S:
        with suppress(AssertionError):
            new = deploy("status")
        if new["is_settled"] and all(one["pid"] != row["pid"] for one in new["rows"]):
            break
    return {"controlled_s": round(controlled_s, 1), "replaced_s": round(time.monotonic() - start, 1)}


@click.command()
@click.option("--actors", default=60, show_default=True, help="Kills of actors, the controller among them.")
@click.option("--nodes", default=30, show_default=True, help="Kills of worker nodes.")
@click.option("--size", default=5, show_default=True, help="Worker nodes of the cluster.")
@click.option("--head", type=click.Choice(["redis", "memory"]), help="Kill the head once instead.")
@click.option("--minutes", default=60.0, show_default=True, help="Begin no kill after so long.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures, as JSON.")
def main(*, actors: int, nodes: int, size: int, head: str | None, minutes: float, seed: int, out: Path | None) -> None:
    """Run it; print the figures."""
    directory, started = Path(tempfile.mkdtemp()), time.monotonic()
    faults = ["actor"] * actors + ["node"] * nodes
    random.Random(seed).shuffle(faults)
    run_siege = partial(siege, directory, faults, nodes=size, seed=seed, seconds=60 * minutes)
    found = behead(directory, head) if head else run_siege()
    found["seconds"] = round(time.monotonic() - started, 1)
    conclude(found, directory, out, good=is_whole(found))


if __name__ == "__main__":
    main()
