"""Contestants that load models into the process they run in, so that each gets one of its own (`children`).

vllm           vLLM, plain
vllm-spec      vLLM with its own draft-model speculation
transformers   `generate`, and assisted generation
alone          not a rival: steps of specq's two models by themselves, for the floor of a round
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from statistics import median
from typing import Any

from specq.bench import chain_steps, engine_steps
from specq.bench.end_to_end.workload import Workload
from specq.engines import ENGINES
from specq.proposers import PROPOSERS

DEPTH = 3  # of vLLM's speculation; 5 was slower with 1, 8, 32 and 64 sessions on an H200
FEW = 2  # prompts for transformers, which is slow
SHORT = 48
CONTEXT, STEPS = 256, 22  # of steps that are timed
MOST_ROWS = 512  # of a step that is timed


def vllm(work: Workload, depth: int = 0) -> dict[str, Any]:
    """Return {"plain" or "K": {sessions: figures}}."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if depth:
        draft = {"method": "draft_model", "model": f"{work.pair}/draft", "num_speculative_tokens": depth}
        options["speculative_config"] = draft | {"max_model_len": 2048}
    llm = LLM(
        model=f"{work.pair}/target", dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=0.6, max_num_seqs=128,
        skip_tokenizer_init=True, disable_log_stats=False, seed=0, **options,
    )  # fmt: skip
    engine: Any = llm.llm_engine
    params = SamplingParams(max_tokens=work.output_len, temperature=0.0, ignore_eos=True, detokenize=False)

    complete = partial(_complete, engine, params, count())
    found = {}
    for sessions in work.sessions:
        before = _counters(llm)
        found[str(sessions)] = work.timed(sessions, partial(complete, at_a_time=sessions))
        rounds, accepted = (after - b for after, b in zip(_counters(llm), before, strict=True))
        if rounds:
            found[str(sessions)]["mean_accepted_length"] = round(1 + accepted / rounds, 3)
    return {f"K={depth}" if depth else "plain": found}


def _complete(
    engine: Any, params: Any, numbers: Iterator[int], prompts: list[list[int]], at_a_time: int
) -> list[list[int]]:
    """Keep `at_a_time` requests under way, as a server with that many users would; `numbers`: names not used yet."""
    texts: dict[str, list[int]] = {}
    waiting, ids = iter(prompts), [str(next(numbers)) for _ in prompts]
    unused, under_way = iter(ids), 0
    while len(texts) < len(prompts):
        for prompt in islice(waiting, at_a_time - under_way):
            engine.add_request(next(unused), {"prompt_token_ids": prompt}, params)
            under_way += 1
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
                under_way -= 1
    return [texts[number] for number in ids]


def _counters(llm: Any) -> tuple[float, float]:
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    return values.get("vllm:spec_decode_num_drafts", 0.0), values.get("vllm:spec_decode_num_accepted_tokens", 0.0)


def vllm_spec(work: Workload) -> dict[str, Any]:
    """Return the same with vLLM's own speculation."""
    return vllm(work, DEPTH)


def transformers(work: Workload) -> dict[str, Any]:
    """Return {"generate" and "assisted": {"1": figures}}; few prompts, and short texts."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    dtype = torch.bfloat16 if work.device.startswith("cuda") else torch.float32
    target, draft = (
        auto.from_pretrained(f"{work.pair}/{role}", dtype=dtype).to(work.device).eval() for role in ("target", "draft")
    )
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"

    def completer(**options: Any) -> Any:
        def complete(prompts: list[list[int]]) -> list[list[int]]:
            texts = []
            for prompt in prompts[:FEW]:
                ids = torch.tensor([prompt], device=work.device)
                with torch.inference_mode():
                    found = target.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=SHORT, min_new_tokens=SHORT,
                        do_sample=False, pad_token_id=0, **options,
                    )  # fmt: skip
                texts.append(found[0, len(prompt) :].tolist())
            return texts

        return complete

    return {
        "generate": {"1": work.timed(1, completer())},
        "assisted": {"1": work.timed(1, completer(assistant_model=draft))},
    }


def alone(work: Workload) -> dict[str, Any]:
    """Return milliseconds of a verify step over sessions and nodes, and of a draft step in a chain."""
    dtype = "bfloat16" if work.device.startswith("cuda") else "float32"
    options: Any = {"device": work.device, "dtype": dtype, "kv_slots": 32 * 1024}
    engine = ENGINES.resolve("torch").make(f"{work.pair}/target", **options)
    verify = {
        name: {"step_ms": round(median(times), 3)}
        for sessions in work.sessions
        for nodes in (0, 6, 15)
        if sessions * (nodes + 1) <= MOST_ROWS
        for name, times in engine_steps.measure(engine, (sessions,), (nodes,), CONTEXT, STEPS)
    }
    draft = PROPOSERS.resolve("draft-model").make(f"{work.pair}/draft", **options)
    return {"verify": verify, "draft": {str(s): chain_steps.measure(draft, s, width=3) for s in work.sessions}}


RIVALS = {"vllm": vllm, "vllm-spec": vllm_spec, "transformers": transformers, "alone": alone}
