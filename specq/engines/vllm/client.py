"""vLLM's public API for the proposer: prompts in, logits of the next token out.

vLLM's prefix cache replaces a session's KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import LLM, SamplingParams

OPTIONS = {"max_logprobs": -1, "logprobs_mode": "raw_logits"}

Row = tuple[list[int], list[float]]  # token ids, and their logits


class PublicClient:
    """A model in vLLM, made with the arguments of `EngineArgs`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = LLM(**options, **OPTIONS)
        config = self._llm.llm_engine.vllm_config
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.vocab_size = int(config.model_config.get_vocab_size())
        self.max_length = int(config.model_config.max_model_len) - 1  # a request always generates one token
        self.kv_slots = int((config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size)

    def ask(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], owners: Sequence[str]) -> list[Any]:
        """Return vLLM's outputs, one per prompt. Only prompts of one owner share cached prefixes."""
        each = zip(prompts, owners, strict=True)
        named = [{"prompt_token_ids": prompt, **({"cache_salt": owner} if owner else {})} for prompt, owner in each]
        return list(self._llm.generate(named, list(params), use_tqdm=False))

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return f32[rows, vocab], -inf for tokens that the rows do not name."""
        logits = torch.full((len(rows), self.vocab_size), -torch.inf)
        for place, (token_ids, values) in enumerate(rows):
            logits[place, torch.tensor(token_ids)] = torch.tensor(values)
        return logits

    def shutdown(self) -> None:
        """Release the device and stop the worker processes."""
        self._llm.llm_engine.engine_core.shutdown()


def request_params(top: int) -> SamplingParams:
    """Return request parameters of a prompt: its next token, and the `top` likeliest tokens there."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=top,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
    )


def last_row(output: Any) -> Row:
    """Return the row of the token after the prompt."""
    flat = output.outputs[0].logprobs
    span = slice(flat.start_indices[0], flat.end_indices[0])
    return flat.token_ids[span], flat.logprobs[span]
