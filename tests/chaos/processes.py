"""Real processes under load, killed and frozen at random moments; models that start at once, or the bundled pair.

Deployment   a broker with a journal, verifiers and drafters, restarted when they are killed, as a supervisor would
attack       so many faults, and what became of the jobs
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specq import Client
from specq.config.values import free_address
from specq.testing.toy import toy_text
from tests.chaos.load import Asked, Load, Prompts, Tally, wait_for

BEATS = ("--heartbeat-ms", "100", "--liveness-ms", "1000")
STEP_MS = 4
JOBS = 8
RECOVERY_S = 5.0
START_S = 300.0  # for all processes to be ready
LONGEST_STOP_S = 2.5  # longer than liveness: who stops so long is taken for dead
SPECQ = (sys.executable, "-m", "specq")
OURS = (sys.executable, "-m", "tests.chaos.programs")
SPOILT = ("--rtt-ms", "2", "--jitter-ms", "3", "--cut-every-s", "3", "--cut-s", "0.1")
ROLES = ("broker", "target", "draft", "client")
QUESTIONS = (
    "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?",
    "Write a Python function that returns the sum of a list.",
    "What is the capital of France?",
    "A train goes 60 miles in an hour. How far does it go in 4 hours?",
)

Process = subprocess.Popen[bytes]
Inject = Callable[[Load, str, str, random.Random], str]


class Deployment:
    """The processes, by name; `real`: with the bundled pair; `proxied`: behind links that delay what they carry and
    break; `options`: of the broker."""

    def __init__(
        self,
        directory: Path,
        *,
        targets: int = 2,
        drafters: int = 2,
        real: bool = False,
        proxied: bool = False,
        options: Sequence[str] = (),
        max_sessions: int = 64,
    ) -> None:
        self.directory, self.real, self.proxied, self.max_sessions = directory, real, proxied, max_sessions
        self.commands, self.journal = dict[str, tuple[str, ...]](), directory / "broker.journal"
        self.address = self._brokers(options)
        self.commands |= {f"target-{i}": self._target(f"target-{i}") for i in range(targets)}
        self.commands |= {f"draft-{i}": self._drafter(f"draft-{i}") for i in range(drafters)}
        self.processes: dict[str, Process] = {}
        self._env = os.environ | {"SPECQ_STATE": str(directory)}

    def _brokers(self, options: Sequence[str]) -> str:
        """Add the broker; return its address."""
        bind = free_address()
        kept = () if "--journal" in options else ("--journal", str(self.journal))
        self.commands["broker"] = (*OURS, "broker", "--bind", bind, *kept, *BEATS, *options)
        return self._proxy("link-front", bind)

    def _target(self, name: str) -> tuple[str, ...]:
        if self.real:
            return self._tiny("target", name)
        bind = free_address()
        toy = (sys.executable, "-m", "tests.journal.toy_target")
        return (*toy, self.address, str(STEP_MS), bind, self._proxy(f"link-{name}", bind), str(self.max_sessions))

    def _tiny(self, role: str, name: str) -> tuple[str, ...]:
        """Return the command of a worker of the bundled pair."""
        common = ("--model", "tiny", "--threads", "1", "--broker", self.address, "--name", name)
        return (*SPECQ, "worker", "--role", role, *common)

    def _proxy(self, name: str, upstream: str) -> str:
        """Return the address at which others find what listens there: a link that delays and breaks, or itself."""
        if not self.proxied:
            return upstream
        listen = free_address()
        proxy = (sys.executable, "-m", "bench.delay_proxy", "--listen", listen, "--upstream", upstream)
        self.commands[name] = (*proxy, *SPOILT)
        return listen

    def _drafter(self, name: str) -> tuple[str, ...]:
        if self.real:
            return self._tiny("draft", name)
        return (*OURS, "drafter", self.address, name)

    def __enter__(self) -> Self:
        for name in self.commands:
            self.start(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        for name in self.names("broker"):
            said = (self.directory / f"{name}.log").read_text("utf-8", "replace")
            assert "Traceback" not in said, said[-4000:]

    def start(self, name: str) -> None:
        """Start a process; what it says goes to a file of its name."""
        with (self.directory / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                self.commands[name], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=self._env
            )

    def kill(self, name: str) -> None:
        """Kill a process without a replacement."""
        self.processes[name].kill()
        self.processes[name].wait()

    @property
    def addresses(self) -> list[str]:
        """The brokers as each client of a load has them."""
        return [self.address]

    def names(self, role: str) -> list[str]:
        return [name for name in self.commands if name.startswith(role)]

    def wait_ready(self, client: Client) -> None:
        """Wait until all workers are there."""
        client.wait_until_ready(
            num_targets=len(self.names("target")), num_drafters=len(self.names("draft")), timeout_s=START_S
        )


def toy_prompts(num_tokens: int = 150) -> Prompts:
    """Yield toy prompts and their texts, for ever."""
    for i in count():
        prompt = [5, 6 + i % 40, 7 + i // 40 % 40]
        yield Asked(prompt, toy_text(prompt, num_tokens))


def real_prompts(deployment: Deployment) -> Prompts:
    """Ask the bundled pair without faults first; yield the questions and their answers for ever."""
    with Client(deployment.address, timeout_s=START_S) as client:
        deployment.wait_ready(client)
        found = []
        for question in QUESTIONS:
            prompt = client.served.codec.encode(question)
            answer = client.generate(token_ids=prompt, max_tokens=64, ignore_eos=True)
            found.append(Asked(prompt, answer.token_ids))
    yield from cycle(found)


def grammar_prompts(deployment: Deployment, grammars: Sequence[Any], params: dict[str, Any]) -> Prompts:
    """Ask the bundled pair plainly for a text of each grammar first; yield the same jobs with drafts, for ever."""
    with Client(deployment.address, timeout_s=START_S) as client:
        deployment.wait_ready(client)
        found = []
        for seed, grammar in enumerate(grammars):
            prompt = client.served.codec.encode(QUESTIONS[seed % len(QUESTIONS)])
            own = {"grammar": grammar, "seed": seed, "max_tokens": 256, "temperature": 0.8 * (seed % 2), **params}
            answer = client.generate(token_ids=prompt, **own, mode="plain")
            found.append(Asked(prompt, answer.token_ids, own))
    yield from cycle(found)


@dataclass
class Siege:
    """What came of an attack."""

    faults: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")  # of them, and after what
    stuck: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def report(self) -> dict[str, Any]:
        """Return the figures as the chaos report has them; times in seconds."""
        found = sorted(self.recoveries)
        return {
            "faults": dict(sorted(self.faults.items())),
            "jobs": self.tally.counts["jobs"],
            **{name: self.tally.counts[name] for name in ("lost", "doubled", "wrong")},
            "recover_p50_s": round(found[len(found) // 2], 3) if found else None,
            "recover_max_s": round(found[-1], 3) if found else None,
            "slowest": self.slowest[1],
            "stuck": self.stuck,
            "failures": self.tally.failures[:10],
        }


def attack(
    deployment: Deployment,
    prompts: Prompts,
    faults: Iterable[tuple[str, str]],
    *,
    seed: int = 0,
    recovery_s: float = RECOVERY_S,
    num_jobs: int = JOBS,
    inject: Inject | None = None,
) -> Siege:
    """Inject the faults, (kind, role) each, one after the other has been overcome; return what came of it.

    `inject` does it, lets it last, undoes it, and returns to whom; by default it kills or freezes.

    A job recovers when its next tokens come after the fault is over: the process runs again, or its next one was
    started.
    """
    rng, siege = random.Random(seed), Siege()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(_client(deployment, address)) for address in deployment.addresses]
        deployment.wait_ready(clients[0])
        with Load(clients, prompts, num_jobs) as load:
            for kind, role in faults:
                time.sleep(rng.uniform(0.0, 0.3))
                name = inject(load, kind, role, rng) if inject else _inject(deployment, kind, role, rng)
                siege.faults[f"{kind} {role}"] += 1
                start = time.monotonic()
                took = load.recovered(start, recovery_s)
                if took is None:
                    siege.stuck.append(f"{kind} {name}")
                    load.recovered(start, 60.0)
                else:
                    siege.recoveries.append(took)
                    siege.slowest = max(siege.slowest, (round(took, 3), f"{kind} {name}"))
            load.finish(60.0)
        siege.tally = load.tally
    return siege


def _client(deployment: Deployment, address: str = "") -> Client:
    return Client(address or deployment.address, timeout_s=120.0, cache_dir=deployment.directory / "cache")


def _inject(deployment: Deployment, kind: str, role: str, rng: random.Random) -> str:
    """Do it, let it last, and undo it; return to whom."""
    if role == "client":  # one with a running job dies or freezes; others may not notice
        return _hit_client(deployment, kind, rng)
    name = rng.choice(deployment.names(role))
    if kind == "kill":
        deployment.kill(name)
        time.sleep(rng.choice([0.0, 0.1, 1.5]))
        deployment.start(name)
    else:
        process = deployment.processes[name]
        process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.05, LONGEST_STOP_S))
        process.send_signal(signal.SIGCONT)
    return name


def _hit_client(deployment: Deployment, kind: str, rng: random.Random) -> str:
    """Start a client of its own with a job, and kill or freeze it in the midst of that."""
    process = subprocess.Popen((*OURS, "client", deployment.address), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # its first tokens are there
        process.send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        time.sleep(rng.uniform(0.0, 0.3))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    return "client"


def faults_of(
    num: int, roles: Sequence[str] = ROLES, kinds: Sequence[str] = ("kill", "stop"), seed: int = 0
) -> list[tuple[str, str]]:
    """Return a number of faults of each kind, spread over the roles, in random order."""
    found = [(kind, roles[i % len(roles)]) for kind in kinds for i in range(num)]
    random.Random(seed).shuffle(found)
    return found


@contextlib.contextmanager
def away(deployment: Deployment, role: str, seconds: float) -> Iterator[None]:
    """Let all processes of a role be away for so long, and the block run then."""
    for name in deployment.names(role):
        deployment.kill(name)
    time.sleep(seconds)
    for name in deployment.names(role):
        deployment.start(name)
    yield


def all_away(deployment: Deployment, role: str, seconds: float, recovery_s: float = RECOVERY_S) -> Siege:
    """Let all workers of a role be away for so long under load; return what came of it."""
    siege = Siege()
    with _client(deployment) as client:
        deployment.wait_ready(client)
        with Load([client], toy_prompts(400), JOBS) as load:
            wait_for(lambda: load.tally.arrivals, RECOVERY_S)
            with away(deployment, role, seconds):
                siege.faults[f"all {role} away for {seconds:g} s"] += 1
                took = load.recovered(time.monotonic(), recovery_s)
                siege.recoveries += [] if took is None else [took]
                siege.stuck += [f"all {role} away"] if took is None else []
            load.finish(60.0)
        siege.tally = load.tally
    return siege
