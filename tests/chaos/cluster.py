"""Several brokers on one PostgreSQL journal, whose every part is killed, frozen and cut off under load.

    scripts/cluster.sh python -m tests.chaos.cluster --kills 200 --failovers 30 --partitions 40 --out cluster.json

`Cluster` is the deployment, `siege` what is done to it, and what came of it. Clients write down what they see, and
`tests.chaos.history` says what is wrong with that. The exit status is 0 iff nothing was.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NoReturn, Self

import click
import zmq

from specq.client.detached import JobDesk
from specq.config.values import free_address
from specq.journal import LEASE_S, SILENT_S
from specq.runtime.machine import describe
from specq.transport import connect_dealer
from tests.chaos.clients import Scribe, fetch, look
from tests.chaos.history import Operation, check, jobs_of, moves_apart, read_history
from tests.chaos.links import WAYS, Links
from tests.chaos.load import Load
from tests.chaos.processes import OURS, SPECQ, Deployment, Siege, attack, toy_prompts
from tests.journal.cluster import Cluster as Servers
from tests.journal.cluster import Database, running

BEATS = ("--heartbeat-ms", "250", "--liveness-ms", "3000")
STEP_MS = 40
JOBS = 6
RECOVERY_S = 10.0  # until every session advances, after the last fault
MOVE_S = 5.0  # until the jobs of a dead broker do, after its death or the database's return
LOOK_S = 0.2  # for processes that ended by themselves, and brokers that reach the database again
MOST_ASKED = 4  # jobs of a broker that wakes
IN_FLIGHT_S = 0.05  # until what was sent to a frozen broker waits there
LONGEST_STOP_S = 5.0  # longer than a lease
AUDIT_S = 120.0  # for all jobs to end, when all is well again
KINDS = ("broker", "target", "draft", "client", "gateway")
PAIRS = (
    ("client", "broker"), ("gateway", "broker"), ("target", "broker"), ("draft", "broker"), ("broker", "target"),
    ("broker", "primary"), ("load", "broker"),
)  # fmt: skip


class Cluster(Deployment):
    """Three brokers, two verifiers, two drafters, two processes of clients, and a gateway.

    Between all of them, and before the servers, are links that can be cut. `bug`: a planted one, in each broker.
    """

    def __init__(self, directory: Path, servers: Servers, links: Links, *, brokers: int = 3, bug: str = "") -> None:
        self.links, self.servers, self._num_brokers, self._bug = links, servers, brokers, bug
        self.database = servers.new_database()
        self.histories = directory / "histories"
        self.histories.mkdir()
        self.processes, self.deaths = {}, Counter[str]()  # of those that ended by themselves
        self._lock, self._ended, self._kept = threading.RLock(), threading.Event(), set[str]()
        self._supervisor = threading.Thread(target=self._supervise)
        super().__init__(directory)
        self.gateway = free_address()
        self.commands["gateway"] = (
            *SPECQ,
            "serve",
            "--broker",
            self.address,
            "--bind",
            self.gateway,
            "--batches",
            "none",
        )
        url = self.gateway.replace("tcp:", "http:")
        for i in range(2):
            ours = (sys.executable, "-m", "tests.chaos.clients")
            self.commands[f"client-{i}"] = (*ours, self.address, str(self.histories), f"client-{i}", url)

    def _brokers(self, options: Sequence[str]) -> str:
        program = (*OURS, "planted", self._bug) if self._bug else (*OURS, "broker")
        ports = ",".join(
            str(self.links.open(one.name, one.port)) for one in (self.servers.primary, self.servers.standby)
        )
        journal = f"postgresql://postgres@/{self.database.name}?host=127.0.0.1,127.0.0.1&port={ports}"
        fronts = []
        for i in range(self._num_brokers):
            bind = free_address()
            fronts.append(self._proxy(f"broker-{i}", bind))
            own = ("--bind", bind, "--advertise", fronts[-1], "--journal", journal)
            self.commands[f"broker-{i}"] = (*program, *own, *BEATS, *options)
        return ",".join(fronts)

    def _target(self, name: str) -> tuple[str, ...]:
        bind = free_address()
        place = (self.address, str(STEP_MS), bind, self._proxy(name, bind))
        return (*OURS, "target", *place, str(self.max_sessions))

    def _proxy(self, name: str, upstream: str) -> str:
        return f"tcp://127.0.0.1:{self.links.open(name, int(upstream.rpartition(':')[2]))}"

    @property
    def addresses(self) -> list[str]:
        """The brokers, each once as the first."""
        found = self.address.split(",")
        return [",".join(found[i:] + found[:i]) for i in range(len(found))]

    def pids(self) -> dict[str, int]:
        """Return the processes that connect, by name; this one is the load's."""
        return {name: process.pid for name, process in self.processes.items()} | {"load": os.getpid()}

    def __enter__(self) -> Self:
        super().__enter__()
        self._supervisor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._supervisor.join()
        super().__exit__(kind, error, at)

    def start(self, name: str) -> None:
        """Start a process, which is kept running from now on."""
        with self._lock:
            super().start(name)
            self._kept.add(name)

    def kill(self, name: str) -> None:
        """Kill a process, and keep it away until it is started."""
        with self._lock:
            self._kept.discard(name)
            super().kill(name)

    def _supervise(self) -> None:
        """Start what ended by itself again. A broker ends if it cannot open the journal when it starts."""
        while not self._ended.wait(LOOK_S):
            with self._lock:
                dead = [name for name in self._kept if self.processes[name].poll() is not None]
                for name in dead:
                    self.start(name)
            self.deaths.update(dead)

    @property
    def _fronts(self) -> dict[str, str]:
        """The brokers' names by their addresses."""
        return dict(zip(self.address.split(","), self.names("broker"), strict=True))

    def held(self) -> dict[str, set[int]]:
        """Return the jobs that each broker holds, by its name."""
        fronts = self._fronts
        found: dict[str, set[int]] = {name: set() for name in fronts.values()}
        statement = "SELECT address, job_id FROM specq.active JOIN specq.brokers ON number = broker"
        for address, job_id in self.database.run(statement):
            found[fronts[address]].add(job_id)
        return found

    def has_database(self, since: float) -> bool:
        """Return whether each broker that runs has renewed its lease since then."""
        now = time.monotonic()
        age = f"{LEASE_S} + extract(epoch FROM clock_timestamp() - max(until))::float8"
        ages = dict(self.database.run(f"SELECT address, {age} FROM specq.brokers GROUP BY address"))
        running = [front for front, name in self._fronts.items() if self.processes[name].poll() is None]
        return all(front in ages and now - ages[front] > since for front in running)


@dataclass
class Times:
    """Measured times, in seconds."""

    events: list[tuple[float, str]] = field(default_factory=list)  # as `moves_apart` takes them
    moved: int = 0  # jobs of brokers that were killed
    restarts: list[float] = field(default_factory=list)  # of the database, until all jobs advance
    failovers: list[float] = field(default_factory=list)


class Injector:
    """Does to a cluster what the faults say, and notes how long its jobs stood still."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.times = cluster, Times()

    def __call__(self, load: Load, kind: str, role: str, rng: random.Random) -> str:
        """Do it, let it last, undo it; return to whom."""
        cluster = self.cluster
        if kind == "cut":
            return self._cut(*role.split("/"), rng)
        if role == "database":
            return self._database(load, kind)
        name = rng.choice(cluster.names(role))
        if kind == "stop" and role == "broker" and rng.random() < 0.5:
            self._freeze_past_its_lease(name)
        elif kind == "stop":
            process = cluster.processes[name]
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.05, LONGEST_STOP_S))
            process.send_signal(signal.SIGCONT)
        elif role == "broker":
            self._kill_broker(load, name, kind)
        else:
            cluster.kill(name)
            time.sleep(rng.choice([0.0, 0.1, 1.5]))
            cluster.start(name)
        return name

    def _kill_broker(self, load: Load, name: str, kind: str) -> None:
        """Kill it, and the database with it unless the kind is "kill". Start it again when its jobs have moved."""
        ids, held = load.ids(), self.cluster.held()[name]
        self.cluster.kill(name)
        killed = time.monotonic()
        watch = self._interrupt(kind) if kind != "kill" else None
        # By then nobody has its jobs yet, and what it sent has arrived, also on a busy machine.
        load.recovered(killed + SILENT_S / 2, 2 * RECOVERY_S, [ids[one] for one in held & ids.keys()])
        if held & ids.keys():
            self.times.events += [(killed, "died"), (time.monotonic(), "moved")]
            self.times.moved += len(held & ids.keys())
        if watch is not None:
            watch.join()
        self.cluster.start(name)

    def _freeze_past_its_lease(self, name: str) -> None:
        """Freeze a broker until others have its jobs. Ask it for these just before it wakes, and the others before."""
        process, fronts = self.cluster.processes[name], self.cluster.address.split(",")
        front = fronts[self.cluster.names("broker").index(name)]
        jobs = sorted(self.cluster.held()[name])[:MOST_ASKED]
        context, scribe = zmq.Context(), Scribe(self.cluster.histories, "harness")
        sockets = {job_id: connect_dealer(context, front, queue=True) for job_id in jobs}
        for job_id, socket in sockets.items():
            look(context, front, job_id, scribe, socket)
        process.send_signal(signal.SIGSTOP)
        time.sleep(LONGEST_STOP_S)
        for job_id in jobs:
            look(context, next(one for one in fronts if one != front), job_id, scribe)
        asking = [
            threading.Thread(target=look, args=(context, front, job_id, scribe, socket))
            for job_id, socket in sockets.items()
        ]
        for one in asking:
            one.start()
        time.sleep(IN_FLIGHT_S)
        process.send_signal(signal.SIGCONT)
        for one in asking:
            one.join()
        context.destroy(0)
        scribe.close()

    def _cut(self, source: str, to: str, rng: random.Random) -> str:
        """Cut one pair, or all of two roles."""
        names = [source, self.cluster.servers.primary.name if to == "primary" else to]
        for i, role in enumerate(names):
            if rng.random() < 0.5 and role in ("broker", "target", "draft", "client"):
                names[i] = rng.choice(self.cluster.names(role))
        ways = rng.choice([WAYS, WAYS, ("up",), ("down",)])
        self.cluster.links.cut(*names, ways)
        time.sleep(rng.uniform(0.5, LONGEST_STOP_S))
        self.cluster.links.heal()
        return f"{'/'.join(names)} {'+'.join(ways)}"

    def _database(self, load: Load, kind: str) -> str:
        start = time.monotonic()
        watch = self._interrupt(kind)
        took = load.recovered(time.monotonic(), 6 * RECOVERY_S)
        times = self.times.restarts if kind == "restart" else self.times.failovers
        times.append(time.monotonic() - start if took is not None else 6 * RECOVERY_S)
        watch.join()
        return kind

    def _interrupt(self, kind: str) -> threading.Thread:
        """Let the database be away; return the thread that notes when all brokers reach it again."""
        servers = self.cluster.servers
        self.times.events.append((time.monotonic(), "gone"))
        if kind == "restart":
            servers.primary.control("restart", "-m", "immediate", "--wait")
        else:
            servers.fail_over()
            self.cluster.database = Database(servers.primary, self.cluster.database.name)
        watch = threading.Thread(target=self._note_return, args=(time.monotonic(),))
        watch.start()
        return watch

    def _note_return(self, since: float) -> None:
        try:
            while not self.cluster.has_database(since) and time.monotonic() < since + 6 * RECOVERY_S:
                time.sleep(LOOK_S)
        finally:  # else all later moves would count as disturbed
            self.times.events.append((time.monotonic(), "back"))


def faults_of(kills: int, restarts: int, failovers: int, partitions: int, seed: int) -> list[tuple[str, str]]:
    """Return faults in random order: half of `kills` are freezes; a third of both are brokers'.

    With every third restart or failover of the database a broker dies.
    """
    roles = [role for role in KINDS for _ in range(4 if role == "broker" else 2)]
    found = [("stop" if i % 2 else "kill", roles[i // 2 % len(roles)]) for i in range(kills)]
    kinds = ["restart"] * restarts + ["failover"] * failovers
    found += [(kind, "broker" if i % 3 == 1 else "database") for i, kind in enumerate(kinds)]
    found += [("cut", "/".join(PAIRS[i % len(PAIRS)])) for i in range(partitions)]
    random.Random(seed).shuffle(found)
    return found


def siege(
    directory: Path,
    faults: Iterable[tuple[str, str]],
    *,
    seed: int = 0,
    bug: str = "",
    recovery_s: float = RECOVERY_S,
) -> dict[str, Any]:
    """Run a cluster under load, inject the faults; return what came of it, with all that is wrong."""
    cluster: Cluster
    with Links(lambda: cluster.pids()) as links:  # noqa: PLW0108 - it is made later
        cluster = Cluster(directory, running(), links, bug=bug)
        with cluster:
            injector = Injector(cluster)
            found = attack(
                cluster, toy_prompts(), faults, seed=seed, recovery_s=recovery_s, num_jobs=JOBS, inject=injector
            )
            for name in cluster.names("client"):
                cluster.kill(name)
            history = audit(cluster.histories, cluster.address)
    return {**report(found, injector.times, history), "died": dict(cluster.deaths)}


def audit(histories: Path, address: str) -> list[Operation]:
    """Follow all accepted jobs to their ends, when all is well again; return the whole history."""
    scribe = Scribe(histories, "audit")
    history = read_history(histories.glob("*.jsonl"))
    accepted = [job_id for job_id, job in jobs_of(history).items() if job.acked < float("inf")]
    until = time.monotonic() + AUDIT_S
    with closing(scribe), JobDesk(address, timeout_s=AUDIT_S) as desk:
        for job_id in accepted:
            if time.monotonic() < until:
                fetch(desk, job_id, scribe)
    return read_history(histories.glob("*.jsonl"))


def report(found: Siege, times: Times, history: Sequence[Operation]) -> dict[str, Any]:
    """Return all figures."""
    wrong = check(history)
    kinds = Counter(one.kind for one in history)
    there, away = moves_apart(times.events)
    return {
        **found.report(),
        "moved_jobs": times.moved,
        "moves": len(there),  # of all jobs of a dead broker, the database being there
        "move_p50_s": _figure(median, there),
        "move_max_s": _figure(max, there),
        "away_moves": len(away),  # the database being away for a time
        "away_move_p50_s": _figure(median, [took for took, _ in away]),
        "away_move_max_s": _figure(max, [took for took, _ in away]),
        "away_move_back_max_s": _figure(max, [since_back for _, since_back in away]),
        "restart_p50_s": _figure(median, times.restarts),
        "restart_max_s": _figure(max, times.restarts),
        "failover_p50_s": _figure(median, times.failovers),
        "failover_max_s": _figure(max, times.failovers),
        "refused": found.tally.counts["refused"],
        "operations": dict(sorted(kinds.items())),
        "history": {"wrong": len(wrong), "first": wrong[:10]},
    }


def _figure(of: Any, found: list[float]) -> float | None:
    return round(of(found), 2) if found else None


def is_good(one: dict[str, Any]) -> bool:
    """Return whether nothing was lost, doubled or wrong, and the jobs of dead brokers moved in time."""
    return is_whole(one) and max(one[name] or 0.0 for name in ("move_max_s", "away_move_back_max_s")) <= MOVE_S


def is_whole(one: dict[str, Any]) -> bool:
    """Return whether nothing was lost, doubled or wrong, and no job stood still for long."""
    counts = sum(one[name] for name in ("lost", "doubled", "wrong"))
    return not counts and not one["stuck"] and not one["history"]["wrong"]


def conclude(found: dict[str, Any], directory: Path, out: Path | None, *, good: bool) -> NoReturn:
    """Print the figures, write them to a file, keep logs and histories if all is not good, and end the program."""
    for name, value in found.items():
        click.echo(f"{name:24} {json.dumps(value)}")
    if out is not None:
        about = describe()
        about["command"] = f"scripts/cluster.sh {about['command']}"
        out.write_text(json.dumps(about | found) + "\n")
    if good:
        shutil.rmtree(directory)
    else:
        click.echo(f"logs and histories: {directory}")
    sys.exit(0 if good else 1)


@click.command()
@click.option("--kills", default=200, show_default=True, help="Kills and freezes of processes.")
@click.option("--restarts", default=10, show_default=True, help="Immediate restarts of the database.")
@click.option("--failovers", default=30, show_default=True, help="Deaths of the primary.")
@click.option("--partitions", default=40, show_default=True, help="Cuts between two roles.")
@click.option("--minutes", default=60.0, show_default=True, help="Then the rest of the faults is left out.")
@click.option("--seed", default=0, show_default=True, help="Of everything random.")
@click.option("--bug", default="", help="A planted bug, by its name in `tests.chaos.mutants.SHARED`.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(
    kills: int, restarts: int, failovers: int, partitions: int, minutes: float, seed: int, bug: str, out: Path | None
) -> None:
    """Run all, print the report, end with status 1 if anything went wrong."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends all processes
    faults = faults_of(kills, restarts, failovers, partitions, seed)
    if bug:  # what can find it
        faults = [(kind, "broker") for kind, role in faults if kind in ("kill", "stop")]
    started = time.monotonic()
    in_time = takewhile(lambda _: time.monotonic() < started + 60 * minutes, faults)
    directory = Path(tempfile.mkdtemp())
    found = siege(directory, in_time, seed=seed, bug=bug)
    found["seconds"] = round(time.monotonic() - started, 1)
    conclude(found, directory, out, good=is_good(found))


if __name__ == "__main__":
    main()
