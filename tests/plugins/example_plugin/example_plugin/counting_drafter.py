"""`counting`: a drafter for targets that count by ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.drafting import CONTEXT, Children, Drafter, DrafterSpec, Expansion
from specq.protocol import Int32Array, ModelInfo, SamplingParams

INFO = ModelInfo(
    name="counting",
    fingerprint="counting",
    dtype="none",
    engine="counting",
    vocab_size=0,
    num_tokens=0,
    eos_ids=(),
    max_length=2**31 - 1,
    tokenizer_hash="",  # it drafts for targets of any tokenizer
)


class CountingDrafter(Drafter):
    """Drafts the number that follows."""

    def __init__(self, model: str = "", **_shared: Any) -> None:
        self.info = INFO
        self._last: dict[int, dict[int, int]] = {}  # session -> node -> its token

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        self._last[session_id] = {CONTEXT: int(token_ids[-1])}

    def close(self, session_id: int) -> None:
        self._last.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        self._last[session_id][CONTEXT] = int(token_ids[-1])

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        return [self._children(request) for request in requests]

    def _children(self, request: Expansion) -> Children:
        tokens = self._last[request.session_id]
        token = tokens[request.node_id] + 1
        if request.child_ids:
            tokens[request.child_ids[0]] = token
        count = min(1, len(request.child_ids))
        return Children(np.array([token][:count], np.int32), np.array([-0.1][:count], np.float32))


COUNTING = DrafterSpec(CountingDrafter, needs_model=False)
