"""specq's deployments: a broker, a verifier, and a drafter in various places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from bench.end_to_end.streams import ListeningClient, Stream, StreamLoad, keeping
from bench.end_to_end.workload import MAX_LEN, VLLM, Workload, is_gpu
from bench.report import attempt, tell
from bench.step_split import StepSplit
from bench.suites.grids import SSD
from specq.client import Result
from specq.config import Config
from specq.processes.servers import Servers, pair_config

READY_S = 400.0
JOB_S = 60.0
MOST_SESSIONS = 128  # unless more are requested
BRISK_MS = 100  # between heartbeats without draft workers: the split of steps waits for some at each load

# The place of the drafter, and what is measured: modes, and keys of `WAYS`.
DEPLOYMENTS = {
    "own": ("plain", "sync", "async"),
    "one": ("sync", "async"),
    "two": ("sync", "async"),
    "two-own": ("async",),
    "ssd": ("plain", "async", "ssd", "ssd jit"),
}
WAYS: dict[str, tuple[str, Mapping[str, Any]]] = {"ssd": ("async", SSD), "ssd jit": ("jit", SSD)}  # modes and shapes
OWN = ("own", "two-own")  # deployments that draft in the verifier's process
BESIDE = ("two", "two-own", "ssd")  # deployments that draft on a GPU beside the verifier's


def measure(name: str, work: Workload) -> dict[str, Any]:
    """Return {mode: {load: figures}} of a deployment."""
    with Servers(_config(name, work)) as servers, ListeningClient(servers.address) as client:
        servers.wait_ready(READY_S)
        split = StepSplit(servers.client, servers.config.broker.heartbeat_ms)
        return until_one_fails(
            (way, load.key, partial(run, _completer(client, load, work, way), split, work, load))
            for way in modes(name, work)
            for load in work.loads
        )


def until_one_fails(runs: Iterable[tuple[str, str, Callable[[], Any]]]) -> dict[str, Any]:
    """Return {variant: {load: figures}} of runs (variant, load, measuring function) on one verifier.

    After a failed run, which has its reason instead of figures, the others do not start: the verifier may be lost.
    Raises CutShortError with the earlier figures if a run is interrupted.
    """
    found: dict[str, Any] = {}
    with keeping(found):
        for variant, key, measured in runs:
            one = attempt(f"{variant} {key}", measured)
            found.setdefault(variant, {})[key] = one
            if "error" in one:
                break
    return found


def modes(name: str, work: Workload) -> list[str]:
    """Return the modes, and the keys of `WAYS`, in which a deployment is measured."""
    return [way for way in DEPLOYMENTS[name] if way in WAYS or way in (work.modes or DEPLOYMENTS[name])]


def _completer(client: ListeningClient, load: StreamLoad, work: Workload, way: str) -> Completer:
    mode, shape = WAYS.get(way, (way, {}))
    return Completer(client, load, work, mode, name=way, shape=shape)


def _config(name: str, work: Workload) -> Config:
    """Return a deployment's configuration."""
    draft = f"{work.pair}/draft"
    config = verifier_config(work, draft if name in OWN else "")
    if name == "own":
        return replace(config, broker=replace(config.broker, heartbeat_ms=BRISK_MS))
    device = f"cuda:{work.tensor_parallel_size}" if name in BESIDE and is_gpu(work) else config.target.device
    section = replace(
        config.draft, model=draft, device=device, dtype=config.target.dtype, kv_slots=work.kv_slots, nice=0
    )
    return replace(config, draft=section, up=replace(config.up, drafters=1))


def verifier_config(work: Workload, draft_model: str) -> Config:
    """Return the configuration of a broker and a verifier, without draft workers.

    draft_model: the model that drafts in the verifier's process. "": none.
    """
    config = pair_config(f"{work.pair}/target", "", 0)
    device, dtype = ("cuda:0", "bfloat16") if is_gpu(work) else ("cpu", "float32")
    return replace(
        config,
        broker=replace(config.broker, journal="none"),
        target=replace(
            config.target, device=device, dtype=dtype, kv_slots=work.kv_slots, prompt_lookup="none",
            max_sessions=max(MOST_SESSIONS, work.most_sessions), draft_model=draft_model,
            engine=work.engine, engine_options=(*(_vllm_options(work) if work.engine == VLLM else ()),
            *work.engine_options),
        ),
    )  # fmt: skip


def _vllm_options(work: Workload) -> tuple[str, ...]:
    """Return the options of vLLM as a rival that also apply to the engine; its KV slots are those of other engines."""
    return (f"max_model_len={MAX_LEN}", f"tensor_parallel_size={work.tensor_parallel_size}")


def run(completer: Completer, split: StepSplit, work: Workload, load: StreamLoad, variant: int = 0) -> dict[str, Any]:
    """Return the figures of a load, completed by one way to draft; `variant` as in `Workload.timed`."""
    found = work.timed(load, completer.complete, learns=completer.mode != "plain", warmed=split.begin, variant=variant)
    tell(f"{completer.name}, {load.key}: {found['tokens_per_second']:.0f} tokens/s")
    return found | speculation(completer.results) | split.figures()


class Completer:
    """Completes prompts through a client, as many at a time as the load says, with the workload's lengths.

    results   of the last prompts.
    name      of the way to draft, or the mode.
    shape     job options that set the shape of drafts.
    wave      the number of jobs after which prompts repeat, or 0. Each wave gets its own tenant, so no text is drafted
              from an earlier one of the same prompt.
    """

    def __init__(
        self,
        client: ListeningClient,
        load: StreamLoad,
        work: Workload,
        mode: str,
        *,
        name: str = "",
        shape: Mapping[str, Any] = MappingProxyType({}),
        wave: int = 0,
    ) -> None:
        self._client, self._load, self._work, self.mode, self.name = client, load, work, mode, name or mode
        self._shape, self._wave, self._calls = shape, wave, 0
        self.results: list[Result] = []

    def complete(self, prompts: list[list[int]], num_tokens: int) -> list[Stream]:
        """Complete each prompt with a seed of its own."""
        options: dict[str, Any] = {"ignore_eos": True, "mode": self.mode}
        options |= {"temperature": self._load.temperature, **self._shape}
        self._calls += 1
        text_of = f"{self.name} {self._load.key} {self._calls}"
        lengths = zip(prompts, self._work.lengths(len(prompts), num_tokens), strict=True)
        requests = [{"token_ids": p, "max_tokens": count, "seed": i, **options} for i, (p, count) in enumerate(lengths)]
        for request in requests if self._wave else ():
            request["tenant"] = f"{text_of} {request['seed'] // self._wave}"
        found = self._client.complete(requests, self._load.sessions, JOB_S)
        self.results = [result for _, result in found]
        return [stream for stream, _ in found]


def speculation(results: list[Result]) -> dict[str, Any]:
    """Return the draft and step figures from the statistics of some jobs."""
    stats = [result.stats | result.internal for result in results]
    rounds = sum(s["rounds"] for s in stats)
    sums = {name: sum(int(s.get(name, 0)) for s in stats) for name in ("drafted", "draft_tokens", "stale", "hits")}
    return {
        "mean_accepted_length": round(sum(len(result.token_ids) for result in results) / rounds, 3),
        "verified_per_round": round(sums["draft_tokens"] / rounds, 2),
        "step_ms": round(sum(s.get("forward_us", 0) for s in stats) / rounds / 1e3, 3),
        **sums,
    }
