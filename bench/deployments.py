"""specq's own processes for a suite, and the contestant over them.

Processes are started with the same Python, read from, and always stopped. Rivals have processes of their own. For turns
see `bench.turns`.

plain        specq without any speculation: no drafters, and no lookups by the verifier (`mode="plain"`).
lookup       specq without drafters, whose verifier drafts what the text repeats. It runs on the processes of `plain`.
and so on    see the suites: the deployment (`bench.deployments`) and the jobs' options set what drafts.

A deployment, or several, run while they are needed. Rule: they start one by one, because a verifier measures its steps
when it starts, and drafters their passes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.scenario import MADE_OF, Completion, Settings, draft_model
from specq.client import Client
from specq.config import Config
from specq.processes.servers import READY_S, Servers, pair_config
from specq.protocol import EngineError
from specq.samples import Prompt

PYTHON = (sys.executable, str(Path(__file__).parent / "__main__.py"))  # before the name of a module and its arguments


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module with these arguments until the block ends; its output can be read."""
    started = subprocess.Popen([*PYTHON, module, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def first_line(started: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints; raises EngineError if it ends without one."""
    assert started.stdout is not None, "it was asked for"
    line = started.stdout.readline().strip()
    if not line:
        raise EngineError(f"a process for measuring ended with status {started.wait()}")
    return line


def output(started: subprocess.Popen[str], timeout_s: float) -> str:
    """Return the whole output of a process; raises EngineError if it fails or takes longer than `timeout_s`."""
    try:
        printed, _ = started.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise EngineError(f"measuring took longer than {timeout_s:g} s") from None
    if started.returncode:
        raise EngineError(f"the measuring process ended with status {started.returncode}")
    return printed


def cpu_seconds(pid: int) -> float | None:
    """Return the processor seconds that a process has used so far; None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


PLAIN, LOOKUP = "plain", "lookup"
NO_DRAFTS = {"mode": "plain"}  # options of the jobs of `plain`


class Specq:
    """specq, through a client, over the sockets."""

    def __init__(
        self, name: str, client: Client, concurrency: int = 0, options: Mapping[str, Any] | None = None, *,
        pids: Mapping[str, int] | None = None, streams: bool = False,
    ) -> None:  # fmt: skip
        """Set the parameters of the jobs.

        options  parameters of each job beside those of the settings, as for `specq.Client.generate`.
        pids     specq's processes. `cpu_s` counts the processor seconds of each in this contestant's turns.
        streams  whether to read texts as a stream and note the arrival times.
        """
        self.name, self.client, self.concurrency, self._streams = name, client, concurrency, streams
        self.options, self._pids, self.cpu_s = dict(options or {}), dict(pids or {}), Counter[str]()

    def run(self, prompts: Sequence[Prompt], settings: Settings) -> list[Completion]:
        """Complete the prompts."""
        complete, before = self._stream if self._streams else self._complete, self._cpu_seconds()
        with ThreadPoolExecutor(self.concurrency or settings.concurrency) as pool:
            found = list(pool.map(lambda prompt: complete(prompt, settings), prompts))
        self.cpu_s.update({name: seconds - before[name] for name, seconds in self._cpu_seconds().items()})
        return found

    def _cpu_seconds(self) -> dict[str, float]:
        """Return the processor seconds of each process so far; empty without /proc."""
        found = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def _asked(self, prompt: Prompt, settings: Settings) -> dict[str, Any]:
        names = ("temperature", "seed", "ignore_eos")
        given = {name: getattr(settings, name) for name in names} | self.options
        return {"token_ids": list(prompt.token_ids), "max_tokens": settings.output_len, **given}

    def _complete(self, prompt: Prompt, settings: Settings) -> Completion:
        result = self.client.generate(**self._asked(prompt, settings))
        return Completion(result.token_ids, result.stats["time_to_first_token_ms"], result.stats | result.internal)

    def _stream(self, prompt: Prompt, settings: Settings) -> Completion:
        token_ids, stats = list[int](), dict[str, Any]()
        num_first, first_s, started = 0, 0.0, time.perf_counter()
        for piece in self.client.stream(**self._asked(prompt, settings)):
            token_ids += piece.token_ids
            if token_ids and not num_first:
                num_first, first_s = len(token_ids), time.perf_counter() - started
            stats = piece.result.stats | piece.result.internal if piece.result else stats
        return Completion(token_ids, 1e3 * first_s, stats, num_first, time.perf_counter() - started)


Starter = Callable[[], AbstractContextManager[Servers]]


def deployment(
    target: str, draft: str = "", drafters: int = 0, *, keys: str = "", has_journal: bool = False, **verifier: Any
) -> Config:
    """Return a broker, a verifier with further options, and draft workers."""
    made = pair_config(target, draft, drafters, keys)
    made = replace(made, target=replace(made.target, **verifier))
    return made if has_journal else replace(made, broker=replace(made.broker, journal="none"))


def starter(made: Callable[[str], Config], draft: str = "", made_of: str = MADE_OF) -> Starter:
    """Return a function that starts the deployment that `made` returns for a draft model.

    The draft model may be created temporarily: see `draft_model`.
    """

    @contextmanager
    def start() -> Iterator[Servers]:
        with draft_model(draft, made_of) as model, Servers(made(model)) as servers:
            yield servers

    return start


class Deployments:
    """The running deployments, by a name for their content."""

    def __init__(self, ready_s: float = READY_S) -> None:
        """Start empty. `ready_s`: time within which each must be ready."""
        self._ready_s = ready_s
        self._running: dict[str, tuple[Servers, ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop_all_but(())

    def serve(self, wanted: Mapping[str, Starter]) -> dict[str, Servers]:
        """Stop the groups that are not wanted, start missing ones, and return all by name, ready."""
        self._stop_all_but(wanted)
        for name, start in wanted.items():
            if name not in self._running:
                self._start(name, start)
        return {name: self._running[name][0] for name in wanted}

    def _start(self, name: str, start: Starter) -> None:
        with ExitStack() as stack:
            servers = stack.enter_context(start())
            servers.wait_ready(self._ready_s)
            self._running[name] = servers, stack.pop_all()

    def _stop_all_but(self, wanted: Mapping[str, Starter] | tuple[()]) -> None:
        with ExitStack() as stack:
            for name in [name for name in self._running if name not in wanted]:
                stack.push(self._running.pop(name)[1])
