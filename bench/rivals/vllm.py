"""vLLM itself, one prompt after the other, greedy, with the logits of its two best tokens at each position."""

from __future__ import annotations

import os
from typing import Any

from specq.models import resolve_model

MAX_LEN = 2048


class Vllm:
    """A target in vLLM with its default settings: on a CPU float32 and eager, on a GPU its own choice with CUDA graphs.

    `given`: further arguments of `LLM`. vLLM's exceptions pass through if it cannot run the model.
    """

    def __init__(self, model: str, dtype: str, **given: Any) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM
        from vllm.platforms import current_platform

        is_cpu = current_platform.device_type == "cpu"
        options: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28} if is_cpu else {}
        options |= {"max_model_len": MAX_LEN} | given
        self._llm = LLM(
            model=resolve_model(model, "target"),
            dtype="float32" if is_cpu and dtype == "auto" else dtype,
            skip_tokenizer_init=True,
            logprobs_mode="raw_logits",
            seed=0,
            **options,
        )

    def shutdown(self) -> None:
        """Release the device."""
        self._llm.llm_engine.engine_core.shutdown()

    @property
    def dtype(self) -> str:
        """The number format of vLLM's computation, such as float32."""
        return str(self._llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")

    def complete(self, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Return `token_ids`, and `best`: at each position the two best tokens with their logits, best first."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, detokenize=False)
        said = self._llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)[0].outputs[0]
        return {"token_ids": list(said.token_ids), "best": [_two_best(at) for at in said.logprobs]}


def _two_best(place: Any) -> list[tuple[int, float]]:
    """Return the two best tokens of vLLM's output for a position: {token: its logit and rank}."""
    ranked = sorted(place.items(), key=lambda item: -item[1].logprob)
    return [(int(token), float(one.logprob)) for token, one in ranked[:2]]
