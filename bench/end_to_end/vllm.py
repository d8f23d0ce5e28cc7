"""vLLM, plain or with its own speculation: a draft model, an EAGLE-3 head, or n-grams of the text.

It is driven as in `vllm bench throughput`: requests in, `LLMEngine.step`, tokens out.

Rule: vLLM is measured at its best. It has as many seats as the largest load has sessions, and its own choice of CUDA
graphs. On a GPU it has asynchronous scheduling, in one process (its `step_with_batch_queue`) as in two: a step is
launched while the device runs the last one. This is requested explicitly, because some versions turn it off beside a
draft model. vLLM samples with the engine's seed. With a seed for each request its sampler would handle the requests one
by one. The report has its actual settings (`engine plain`, `engine K=3`). It runs in a separate process, so that the
GPU is empty afterwards: `python -m bench.end_to_end.vllm WORKLOAD OPTIONS RESULT`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.deployments import PYTHON
from bench.end_to_end.streams import Stream, StreamLoad
from bench.end_to_end.workload import MAX_LEN, Workload, is_gpu
from bench.report import attempt, tell
from specq.protocol import EngineError

LEAST_SEATS = 128
MEMORY = 0.6  # share of the GPU's memory
CPU_KV_BYTES = 1 << 30
MOST_NGRAM = 4  # maximum tokens to look for in the text
PATIENCE_S = 500.0  # with one process

# What each way to draft needs besides its depth.
DRAFTING: dict[str, Callable[[Workload], dict[str, Any]]] = {
    "draft_model": lambda work: {"model": f"{work.pair}/draft", "max_model_len": MAX_LEN},
    "eagle3": lambda work: {"model": f"{work.pair}/eagle3"},
    "ngram": lambda _: {"prompt_lookup_max": MOST_NGRAM},
}


def measure_in_child(work: Workload, **options: Any) -> dict[str, Any]:
    """Return the result of `measure`, run in a separate process. Raises EngineError with its output if it fails."""
    with TemporaryDirectory(prefix="specq-vllm-") as folder:
        workload, result, log = (Path(folder) / file for file in ("workload.json", "result.json", "log"))
        work.save(workload)
        command = [*PYTHON, "bench.end_to_end.vllm", str(workload), json.dumps(options), str(result)]
        with log.open("wb") as output:
            try:
                done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT, timeout=PATIENCE_S)
                failure = f"ended with status {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                failure = f"gave no result within {PATIENCE_S:g} s"
        if failure:
            raise EngineError(f"vllm {failure}: {log.read_text(errors='replace')[-1500:]}")
        found: dict[str, Any] = json.loads(result.read_text("utf-8"))
        return found


def measure(
    work: Workload, depth: int = 0, *, method: str = "draft_model", num_processes: int = 1, scheduling: str = "async"
) -> dict[str, Any]:
    """Return {"plain" or "K=depth": {load: figures}}, and vLLM's settings under "engine plain" and so on.

    depth          drafted tokens a step. 0: none.
    method         what drafts them: one of DRAFTING.
    num_processes  2: vLLM schedules and computes in a separate process. This process receives its outputs.
    scheduling     "async", or "default": vLLM's own choice.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": str(num_processes - 1), "VLLM_LOGGING_LEVEL": "ERROR"}
    llm = _load(work, depth, scheduling, method)
    rival = _Vllm(llm, work)
    name = f"K={depth}" if depth else "plain"
    found = {load.key: attempt(f"{name} {load.key}", partial(rival.measure, load)) for load in work.loads}
    effective = _effective(llm)
    llm.llm_engine.engine_core.shutdown()
    return {name: found, f"engine {name}": effective | {"num_processes": num_processes}}


def _load(work: Workload, depth: int, scheduling: str, method: str = "draft_model") -> Any:
    """Return vLLM with the models, without asynchronous scheduling if it refuses the request."""
    from vllm import LLM

    arguments = _arguments(work, depth, method)
    if not is_gpu(work) or scheduling != "async":
        return LLM(**arguments)
    try:
        return LLM(**arguments, async_scheduling=True)
    except ValueError as error:  # an error in its configuration, before any loading
        tell(f"vLLM refuses asynchronous scheduling: {error}")
        return LLM(**arguments)


def _arguments(work: Workload, depth: int, method: str) -> dict[str, Any]:
    options = (
        {"dtype": "bfloat16", "gpu_memory_utilization": MEMORY}
        if is_gpu(work)
        else {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES}
    )
    if depth:
        options["speculative_config"] = {"method": method, "num_speculative_tokens": depth, **DRAFTING[method](work)}
    if work.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = work.tensor_parallel_size
    return options | {
        "model": f"{work.pair}/target",
        "max_model_len": MAX_LEN,
        "max_num_seqs": max(LEAST_SEATS, work.most_sessions),
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
    }


def _effective(llm: Any) -> dict[str, Any]:
    """Return the settings that vLLM derived from its arguments and its environment."""
    config = llm.llm_engine.vllm_config
    scheduler, compilation = config.scheduler_config, config.compilation_config
    sizes = list(compilation.cudagraph_capture_sizes or ())
    return {
        "async_scheduling": bool(scheduler.async_scheduling),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "cudagraph_sizes": [len(sizes), min(sizes, default=0), max(sizes, default=0)],  # how many, from, to
        "v2_model_runner": getattr(config, "use_v2_model_runner", None),
        "enforce_eager": config.model_config.enforce_eager,
    }


class _Vllm:
    """A loaded vLLM that completes the workload's prompts."""

    def __init__(self, llm: Any, work: Workload) -> None:
        self._llm, self._engine, self._work = llm, llm.llm_engine, work
        self._names = map(str, count())  # of requests

    def measure(self, load: StreamLoad) -> dict[str, Any]:
        """Return the figures of a load."""
        before: list[tuple[float, float]] = []
        found = self._work.timed(
            load, partial(self._complete, load), warmed=lambda: before.append(_counters(self._llm))
        )
        rounds, accepted = (after - earlier for after, earlier in zip(_counters(self._llm), before[0], strict=True))
        return found | ({"mean_accepted_length": round(1 + accepted / rounds, 3)} if rounds else {})

    def _complete(self, load: StreamLoad, prompts: list[list[int]], num_tokens: int) -> list[Stream]:
        """Keep the load's number of requests in flight, as a server with that many users would."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {"temperature": load.temperature, "ignore_eos": True, "detokenize": False}
        options |= {"output_kind": RequestOutputKind.DELTA}
        params = [SamplingParams(max_tokens=n, **options) for n in self._work.lengths(len(prompts), num_tokens)]
        streams = {name: Stream([]) for name in islice(self._names, len(prompts))}
        waiting = zip(streams, prompts, params, strict=True)
        under_way, ended = 0, 0
        while ended < len(prompts):
            for name, prompt, own in islice(waiting, load.sessions - under_way):
                streams[name].started = time.perf_counter()
                self._engine.add_request(name, {"prompt_token_ids": prompt}, own)
                under_way += 1
            finished = self._step(streams)
            under_way, ended = under_way - finished, ended + finished
        return list(streams.values())

    def _step(self, streams: dict[str, Stream]) -> int:
        """Let vLLM run a step; return how many requests ended with it."""
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            new, stream = output.outputs[0].token_ids, streams[output.request_id]
            stream.token_ids += new
            if new:
                stream.arrivals.append(now)
        return sum(output.finished for output in outputs)


def _counters(llm: Any) -> tuple[float, float]:
    """Return how many drafts vLLM has verified so far, and how many of their tokens it accepted."""
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    return values.get("vllm:spec_decode_num_drafts", 0.0), values.get("vllm:spec_decode_num_accepted_tokens", 0.0)


if __name__ == "__main__":
    asked, given, found = sys.argv[1:4]
    Path(found).write_text(json.dumps(measure(Workload.load(Path(asked)), **json.loads(given))), encoding="utf-8")
