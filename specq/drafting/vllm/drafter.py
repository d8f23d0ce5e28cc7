"""`vllm`: a draft model that vLLM runs, over its public API: a pass is one batch of requests of one token each.

It serves draft models that the `draft-model` proposer does not load. Children come from the likeliest tokens that vLLM
returns, `CANDIDATES` in number. A draft distribution that is sent is truncated to these, and the children are drawn
from the distribution as it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.drafting.draft_model.children import ChildMaker, ChildRequest
from specq.drafting.interface import NO_CHILDREN, Children, Drafter, Expansion
from specq.drafting.paths import DraftPaths
from specq.engines import resolve_directory
from specq.engines.vllm.options import make_options, model_info, prepare_environment
from specq.protocol import EngineError, Int32Array, SamplingParams

CANDIDATES = 64
MAX_REQUESTS = 256  # requests of a pass that vLLM runs at once
MAX_ROWS = 2048


@dataclass(slots=True)
class _Session:
    params: SamplingParams
    token_ids: list[int]
    owner: str
    paths: DraftPaths = field(default_factory=DraftPaths)


class VllmModel(Drafter):
    """Drafts with a model in vLLM.

    options                  arguments of vLLM's `EngineArgs`.
    distribution_size, rng   as in `specq.drafting.draft_model.children.ChildMaker`.

    The other arguments are as in `specq.engines.vllm.engine.VllmEngine`.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        distribution_size: int = 32,
        options: Mapping[str, Any] | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        prepare_environment(device)
        directory = resolve_directory(model, "the vllm proposer")
        arguments = make_options(
            directory,
            device=device,
            dtype=dtype,
            kv_slots=kv_slots,
            max_sessions=MAX_REQUESTS,
            max_step_rows=MAX_ROWS,
            given=options or {},
        )
        from specq.engines.vllm.client import PublicClient, last_row, request_params

        self._client, self._last_row = PublicClient(arguments), last_row
        self._candidates = min(CANDIDATES, self._client.vocab_size)
        self._asked = request_params(self._candidates)
        self.maker: ChildMaker = ChildMaker(min(distribution_size, self._candidates), rng or np.random.default_rng())
        self._sessions: dict[int, _Session] = {}
        self.info = model_info(arguments, self._client, name)

    def shutdown(self) -> None:
        """Release the device and stop the worker processes."""
        self._client.shutdown()

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """See `Drafter.open`."""
        self._sessions[session_id] = _Session(params, self._embeddable(token_ids), owner)

    def close(self, session_id: int) -> None:
        """See `Drafter.close`."""
        self._sessions.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """See `Drafter.commit`."""
        session, tokens = self._sessions[session_id], self._embeddable(token_ids)
        session.token_ids.extend(tokens)
        session.paths.commit(tokens, path)

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Request what follows each node; none at the model's maximum length. See `Drafter.expand`."""
        prompts = [self._prompt(request) for request in requests]
        fit = [i for i, prompt in enumerate(prompts) if len(prompt) <= self.info.max_length and requests[i].child_ids]
        answers = [NO_CHILDREN] * len(requests)
        if fit:
            owners = [self._sessions[requests[i].session_id].owner for i in fit]
            outputs = self._client.ask([prompts[i] for i in fit], [self._asked] * len(fit), owners)
            logits = self._client.logits([self._last_row(output) for output in outputs])
            wanted = [self._wanted(requests[i], len(prompts[i])) for i in fit]
            made = self.maker.make(wanted, logits, self.info.num_tokens)
            for i, children in zip(fit, made, strict=True):
                answers[i] = self._answer(requests[i], children)
        return answers

    def _prompt(self, request: Expansion) -> list[int]:
        session = self._sessions[request.session_id]
        if request.node_id not in session.paths:
            raise EngineError(f"draft node {request.node_id} is unknown or was removed")
        return [*session.token_ids, *session.paths[request.node_id]]

    def _wanted(self, request: Expansion, position: int) -> ChildRequest:
        params, count = self._sessions[request.session_id].params, min(len(request.child_ids), self._candidates)
        return ChildRequest(params, position, count, request.session_id)

    def _answer(self, request: Expansion, made: Children) -> Children:
        """Cut children to the requested number, and store them as nodes."""
        children = made.first(len(request.child_ids))
        self._sessions[request.session_id].paths.add(request, children.token_ids.tolist())
        return children

    def _embeddable(self, token_ids: Int32Array) -> list[int]:
        """Clip token ids to the vocabulary.

        A target's padded vocabulary may be larger. Tokens that this model cannot embed only make its guesses worse.
        """
        embeddable: list[int] = np.clip(token_ids, 0, self.info.vocab_size - 1).tolist()
        return embeddable
