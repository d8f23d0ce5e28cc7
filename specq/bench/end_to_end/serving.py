"""specq's deployments: a broker, a verifier, and a drafter that lives somewhere."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from specq.bench.end_to_end.workload import Workload
from specq.bench.servers import Servers, pair_config
from specq.client import Client, Result
from specq.config import Config

READY_S = 400.0
KV_SLOTS = 48 * 1024
JOB_S = 60.0

# Where the drafter is, and the modes that are measured.
DEPLOYMENTS = {
    "own": ("plain", "sync", "async"),
    "one": ("sync", "async"),
    "two": ("sync", "async"),
    "two-own": ("async",),
}
OWN, SECOND = ("own", "two-own"), ("two", "two-own")  # who drafts in the verifier's process, and on a second GPU


def measure(name: str, work: Workload) -> dict[str, Any]:
    """Return {mode: {sessions: figures}} of a deployment."""
    with Servers(_config(name, work)) as servers:
        servers.wait_ready(READY_S)
        return {
            mode: {str(count): _run(servers.client, work, count, mode) for count in work.sessions}
            for mode in DEPLOYMENTS[name]
        }


def _config(name: str, work: Workload) -> Config:
    target, draft = (f"{work.pair}/{role}" for role in ("target", "draft"))
    config = pair_config(target, draft, 0 if name == "own" else 1)
    is_gpu = work.device.startswith("cuda")
    first, second = ("cuda:0", "cuda:1" if name in SECOND else "cuda:0") if is_gpu else ("cpu", "cpu")
    dtype = "bfloat16" if is_gpu else "float32"
    return replace(
        config,
        broker=replace(config.broker, journal="none"),
        target=replace(
            config.target, device=first, dtype=dtype, kv_slots=KV_SLOTS, prompt_lookup="none", max_sessions=128,
            draft_model=draft if name in OWN else "",
        ),
        draft=replace(config.draft, device=second, dtype=dtype, kv_slots=KV_SLOTS, nice=0),
    )  # fmt: skip


def _run(client: Client, work: Workload, num_sessions: int, mode: str) -> dict[str, Any]:
    results: list[Result] = []

    def complete(prompts: list[list[int]]) -> list[list[int]]:
        with ThreadPoolExecutor(num_sessions) as pool:
            results[:] = pool.map(lambda prompt: _complete(client, work, prompt, mode), prompts)
        return [result.token_ids for result in results]

    return work.timed(num_sessions, complete) | _figures(results)


def _complete(client: Client, work: Workload, prompt: list[int], mode: str) -> Result:
    job = client.submit(token_ids=prompt, max_tokens=work.output_len, ignore_eos=True, mode=mode)
    return job.result(JOB_S)


def _figures(results: list[Result]) -> dict[str, Any]:
    """Return what the jobs' statistics say of the last repetition."""
    stats = [result.stats | result.internal for result in results]
    rounds = sum(s["rounds"] for s in stats)
    sums = {name: sum(int(s.get(name, 0)) for s in stats) for name in ("drafted", "draft_tokens", "stale", "hits")}
    return {
        "mean_accepted_length": round(sum(len(result.token_ids) for result in results) / rounds, 3),
        "verified_per_round": round(sums["draft_tokens"] / rounds, 2),
        "step_ms": round(sum(s.get("forward_us", 0) for s in stats) / rounds / 1e3, 3),
        "first_token_ms": round(statistics.median(s["time_to_first_token_ms"] for s in stats), 1),
        **sums,
    }
