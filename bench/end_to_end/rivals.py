"""Contestants that load models into the process they run in, so that each gets one of its own (`children`).

vllm           vLLM, plain, and with its own draft-model speculation (`bench.end_to_end.vllm`)
transformers   `generate`, and assisted generation
alone          not a rival: steps of specq's two models by themselves, for the floor of a round
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from bench import chain_steps, engine_steps
from bench.end_to_end.streams import Load, Stream
from bench.end_to_end.vllm import vllm
from bench.end_to_end.workload import Workload
from specq.drafting import PROPOSERS
from specq.engines import ENGINES

FEW = 2  # prompts for transformers, which is slow
SHORT = 48
CONTEXT, STEPS = 256, 22  # of steps that are timed
SESSION_SLOTS, LEAST_SLOTS = 512, 32 * 1024  # KV slots for those: of a session; of all
MOST_ROWS = 512  # of a step that is timed


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
        def complete(prompts: list[list[int]], num_tokens: int) -> list[Stream]:
            texts = []
            length = min(num_tokens, SHORT)
            for prompt in prompts[:FEW]:
                ids = torch.tensor([prompt], device=work.device)
                with torch.inference_mode():
                    found = target.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length,
                        do_sample=False, pad_token_id=0, **options,
                    )  # fmt: skip
                texts.append(Stream(found[0, len(prompt) :].tolist()))
            return texts

        return complete

    return {
        "generate": {"1": work.timed(Load(1), completer())},
        "assisted": {"1": work.timed(Load(1), completer(assistant_model=draft))},
    }


def alone(work: Workload) -> dict[str, Any]:
    """Return milliseconds of a verify step over sessions and nodes, and of a draft step in a chain."""
    dtype = "bfloat16" if work.device.startswith("cuda") else "float32"
    slots = max(LEAST_SLOTS, SESSION_SLOTS * work.most_sessions)
    options: Any = {"device": work.device, "dtype": dtype, "kv_slots": slots}
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


RIVALS: dict[str, Callable[..., dict[str, Any]]] = {"vllm": vllm, "transformers": transformers, "alone": alone}
