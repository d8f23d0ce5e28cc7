"""Real processes on this machine, the drafters behind a delay proxy, and what they do with the prompts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specq.bench.servers import Servers, pair_config
from specq.client import Client, Result
from specq.protocol import EngineError

PROXY = "specq.bench.delay_proxy"
READY_S = 240.0
JOB_S = 120.0  # patience with one job
COUNTS = ("rounds", "drafted", "draft_tokens", "accepted_tokens", "hits", "misses", "stale", "forward_us")

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What is served, and how: `in_flight` jobs at a time, of `output_len` tokens each; `line`: more options of the proxy."""

    model: str
    draft_model: str
    drafters: int
    in_flight: int
    output_len: int
    line: tuple[str, ...] = ()


@contextmanager
def serving(setting: Setting, rtt_ms: float) -> Iterator[Client]:
    """Start everything, the drafters `rtt_ms` away; stop it all at the end."""
    config = pair_config(setting.model, setting.draft_model, setting.drafters)
    config = replace(config, broker=replace(config.broker, journal="none"))
    with ExitStack() as stack:
        is_far = rtt_ms or setting.line
        far = stack.enter_context(proxy(config.broker.bind, rtt_ms, setting.line)) if is_far else ""
        servers = stack.enter_context(Servers(config, drafters_at=far))
        servers.wait_ready(READY_S)
        yield servers.client


@contextmanager
def proxy(upstream: str, rtt_ms: float, line: Sequence[str] = ()) -> Iterator[str]:
    """Run a delay proxy; yield the address to connect to."""
    command = [sys.executable, "-m", PROXY, "--upstream", upstream, "--rtt-ms", str(rtt_ms), *line]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it was asked for"
        address = process.stdout.readline().strip()
        if not address:
            raise EngineError(f"the delay proxy ended with status {process.wait()}")
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=20)


def measure(
    client: Client, prompts: Sequence[Prompt], setting: Setting, mode: str
) -> tuple[dict[str, Any], list[Result]]:
    """Complete all prompts, so many at a time; return the figures and the results, in the prompts' order.

    The prompts have been computed before, in every mode alike, so that what is timed is decoding.
    """
    for prompt in prompts:
        _complete(client, prompt, replace(setting, output_len=4), mode)
    began = time.perf_counter()
    with ThreadPoolExecutor(setting.in_flight) as pool:
        results = list(pool.map(lambda prompt: _complete(client, prompt, setting, mode), prompts))
    return figures(results, time.perf_counter() - began), results


def _complete(client: Client, prompt: Prompt, setting: Setting, mode: str) -> Result:
    job = client.submit(token_ids=list(prompt), max_tokens=setting.output_len, ignore_eos=True, mode=mode)
    return job.result(JOB_S)


def figures(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Return the rate and the sums of the jobs' counts; `step_ms` is the mean step as the verifier timed it in service."""
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
