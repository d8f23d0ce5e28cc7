"""vLLM driven by prompts: its public API only. A session is a list of tokens; vLLM's prefix cache stands in for its KV.

A step is one batch of requests of one token each. Where only the likeliest tokens count (T = 0), a session's request is
its context with the chain, and asks for the likeliest token at each place of the prompt. Else each row is a request of
its own, which asks for all logits: vLLM makes a Python number of each, so a large vocabulary is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams

from specq.engines.interface import Launched
from specq.engines.launching import Computed
from specq.engines.vllm.asking import ALL, Asker, asking, last_rows
from specq.protocol import EngineError, Int32Array, IntpArray, SessionStep, StepOutput
from specq.protocol import SamplingParams as JobParams
from specq.verification import Judgements, StepBatch, strategy
from specq.verification.faults import judge_each

MAX_CHAIN = 16


class Prompts:
    """Sessions as prompts; made with the arguments of `EngineArgs`; see `specq.engines.vllm.engine.Way`."""

    max_chain = MAX_CHAIN
    even_chains: Mapping[int, int] = {}
    overlaps = takes_unread = is_apart = has_graphs = False

    def __init__(self, options: dict[str, Any], *, verbose: bool) -> None:
        self._asker = Asker(options)
        self.dtype, self.vocab_size = self._asker.dtype, self._asker.vocab_size
        self.max_length, self.kv_slots = self._asker.max_length, self._asker.kv_slots
        self._contexts: dict[int, list[int]] = {}  # of each session, the tokens that were in a step
        self._owners: dict[int, str] = {}

    @property
    def free_slots(self) -> int:
        """KV slots besides those of open sessions; vLLM itself makes requests wait where they are short."""
        return self.kv_slots - sum(map(len, self._contexts.values()))

    def open(self, session_id: int, token_ids: Int32Array, owner: str) -> int:
        """Start a session; what is cached of it, vLLM finds by itself."""
        if session_id in self._contexts:
            raise EngineError(f"session {session_id} is open already")
        self._contexts[session_id], self._owners[session_id] = [], owner
        return 0

    def close(self, session_id: int) -> None:
        """Forget a session; unknown ones are ignored."""
        self._contexts.pop(session_id, None)
        self._owners.pop(session_id, None)

    def lengths(self, session_ids: Sequence[int]) -> IntpArray:
        """Return how many tokens of each session were in steps, i64[n]; EngineError for one that is not open."""
        try:
            return np.array([len(self._contexts[session_id]) for session_id in session_ids], np.intp)
        except KeyError as error:
            raise EngineError(f"session {error.args[0]} is not open") from None

    def launch(self, steps: StepBatch) -> Launched:
        """Run steps that were checked."""
        return Computed(StepOutput(self._step(steps)))

    def _step(self, steps: StepBatch) -> Judgements:
        for step in steps:
            self._contexts[step.session_id] += step.token_ids.tolist()
        try:
            logits = self._logits(steps)
            judgements = judge_each(steps, logits) if len(logits) else Judgements.of([])
        except BaseException:
            for step in steps:
                del self._contexts[step.session_id][step.start :]
            raise
        for judgement in judgements:
            self._contexts[judgement.session_id] += judgement.token_ids[:-1].tolist()
        return judgements

    def _logits(self, steps: Sequence[SessionStep]) -> torch.Tensor:
        """Return f32[rows, vocab]: the logits of all judged rows; -inf for those that are not known and do not count."""
        each = [(request, self._owners[step.session_id]) for step in steps for request in self._requests(step)]
        asked, owners = [request for request, _ in each], [owner for _, owner in each]
        outputs = self._asker.ask([prompt for prompt, _, _ in asked], [params for _, params, _ in asked], owners)
        outputs = self._ask_again(asked, owners, outputs)
        pairs = zip(asked, outputs, strict=True)
        return self._asker.logits([row for (_, _, num_rows), output in pairs for row in last_rows(output, num_rows)])

    def _requests(self, step: SessionStep) -> list[tuple[list[int], SamplingParams, int]]:
        """Return the prompts that a step takes, what is asked of each, and how many rows it answers."""
        context, chain = self._contexts[step.session_id], step.tree.token_ids.tolist()
        if not step.judged:
            return [(context, asking(), 0)]
        if _needs_argmax_only(step.params):
            return [(context + chain, asking(top=1, of_prompt=bool(chain)), 1 + len(chain))]
        return [(context + chain[:count], asking(top=ALL), 1) for count in range(len(chain) + 1)]

    def _ask_again(
        self, asked: list[tuple[list[int], SamplingParams, int]], owners: list[str], outputs: list[Any]
    ) -> list[Any]:
        """Return the outputs, those again whose drafted tokens were in the prefix cache: their rows are garbage."""
        spoilt = [
            place
            for place, ((prompt, _, num_rows), output) in enumerate(zip(asked, outputs, strict=True))
            if num_rows > 1 and (output.num_cached_tokens or 0) > len(prompt) - num_rows
        ]
        if spoilt:
            params = [asking(top=1, of_prompt=True, read_cache=False)] * len(spoilt)
            fresh = self._asker.ask([asked[place][0] for place in spoilt], params, [owners[place] for place in spoilt])
            outputs = [*outputs]
            for place, output in zip(spoilt, fresh, strict=True):
                outputs[place] = output
        return outputs

    def shutdown(self) -> None:
        """Let go of the device and of worker processes."""
        self._asker.shutdown()


def _needs_argmax_only(params: JobParams) -> bool:
    """Return whether only the likeliest token of each row counts: a lossless text at T = 0 is made of those."""
    shapes = params.logit_bias or params.needs_history or params.logprobs >= 0
    return params.temperature == 0 and strategy(params.strategy).is_lossless(params) and not shapes
