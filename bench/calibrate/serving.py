"""Real processes on this machine, with the drafters behind a delay proxy: their results and costs for the prompts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench.calibrate.compare import WARM_LEN, since
from bench.deployments import deployment, first_line, process
from specq.client import Client, Result
from specq.processes.servers import Servers
from specq.runtime.usage import Usage

PROXY = "bench.delay_proxy"
READY_S = 240.0
JOB_S = 120.0  # time limit for one job
POLL_S = 0.05
COUNTS = ("rounds", "drafted", "draft_tokens", "accepted_tokens", "hits", "misses", "stale", "forward_us")

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What is served, and how.

    in_flight    jobs at a time.
    output_len   tokens of each job.
    line         more options of the proxy.
    """

    model: str
    draft_model: str
    drafters: int
    in_flight: int
    output_len: int
    line: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observed:
    """The results of some processes for some jobs.

    steps    the figures of the first verifier's steps.
    drafted  passes, drafts and nodes of all drafters.
    used     the processor time of each process, and of others.
    """

    results: list[Result]
    seconds: float
    steps: dict[str, Any]
    drafted: Counter[str]
    used: Usage


class Service:
    """Processes that serve."""

    def __init__(self, client: Client, pids: Mapping[str, int]) -> None:
        self.client, self._pids = client, pids

    def counts(self) -> tuple[dict[str, Any], Counter[str]]:
        """Return the counts of the first verifier, and those of all drafters together.

        All workers have reported since this call began.
        """
        asked, workers = time.monotonic(), self._workers()
        seconds = 0.0  # until the report was requested
        while any(worker["heard_s_ago"] >= seconds for worker in workers):
            time.sleep(POLL_S)
            seconds = time.monotonic() - asked
            workers = self._workers()
        verifier = next(worker for worker in workers if worker["role"] == "target")
        drafters = Counter[str]()
        for worker in workers:
            if worker["role"] == "draft":
                numbers = {name: value for name, value in worker["metrics"].items() if isinstance(value, int)}
                drafters.update({**numbers, "passes": worker["steps"]})
        return {**verifier["metrics"], "steps": verifier["steps"]}, drafters

    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.client.status()["workers"]
        return workers

    def usage(self) -> Usage:
        """Return the processor time of the processes so far."""
        return Usage.of(self._pids)


@contextmanager
def serving(setting: Setting, rtt_ms: float = 0.0, drafts: str = "measured") -> Iterator[Service]:
    """Start everything, the drafters `rtt_ms` away; stop it all at the end. `drafts` as in `TargetConfig`."""
    config = deployment(setting.model, setting.draft_model, setting.drafters, drafts=drafts)
    with ExitStack() as stack:
        is_far = rtt_ms or setting.line
        far = stack.enter_context(proxy(config.broker.bind, rtt_ms, setting.line)) if is_far else ""
        servers = stack.enter_context(Servers(config, drafters_at=far))
        servers.wait_ready(READY_S)
        yield Service(servers.client, servers.pids())


@contextmanager
def proxy(upstream: str, rtt_ms: float, line: Sequence[str] = ()) -> Iterator[str]:
    """Run a delay proxy; yield the address to connect to."""
    with process(PROXY, "--upstream", upstream, "--rtt-ms", str(rtt_ms), *line) as started:
        yield first_line(started)


def measure(
    service: Service, prompts: Sequence[Prompt], setting: Setting, mode: str
) -> tuple[dict[str, Any], list[Result]]:
    """Complete all prompts, `in_flight` at a time; return the figures and the results, in the prompts' order."""
    found = observed(service, prompts, setting, mode)
    return figures(found.results, found.seconds) | {"steps": found.steps, "load": found.used.to_dict()}, found.results


def observed(service: Service, prompts: Sequence[Prompt], setting: Setting, mode: str) -> Observed:
    """Complete all prompts, `in_flight` at a time.

    The prompts are computed before, in every mode alike, so that the timed part is decoding.
    """
    client = service.client
    for prompt in prompts:
        _complete(client, prompt, replace(setting, output_len=WARM_LEN), mode)
    (verifier, drafters), used = service.counts(), service.usage()
    began = time.perf_counter()
    with ThreadPoolExecutor(setting.in_flight) as pool:
        results = list(pool.map(lambda prompt: _complete(client, prompt, setting, mode), prompts))
    seconds, used = time.perf_counter() - began, service.usage().since(used)
    verifier_after, drafters_after = service.counts()
    return Observed(results, seconds, since(verifier, verifier_after), drafters_after - drafters, used)


def _complete(client: Client, prompt: Prompt, setting: Setting, mode: str) -> Result:
    job = client.submit(token_ids=list(prompt), max_tokens=setting.output_len, ignore_eos=True, mode=mode)
    return job.result(JOB_S)


def figures(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Return the rate and the sums of the jobs' counts; `step_ms`: the mean step as timed by the verifier."""
    sums = {name: sum(int((result.stats | result.internal).get(name, 0)) for result in results) for name in COUNTS}
    num_tokens = sum(len(result.token_ids) for result in results)
    return {
        "tokens_per_second": round(num_tokens / seconds, 2),
        "mean_accepted_length": round(num_tokens / sums["rounds"], 4),
        "hit_rate": round(sums["hits"] / max(sums["hits"] + sums["misses"], 1), 4),
        "step_ms": round(sums["forward_us"] / sums["rounds"] / 1e3, 3),
        "seconds": round(seconds, 2),
        "num_tokens": num_tokens,
        **sums,
    }
